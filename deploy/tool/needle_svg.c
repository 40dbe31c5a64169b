/* The heat map of needle_svg.h, written by hand: rectangles and text are all it needs. */
#include "deploy/tool/needle_svg.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { CELL_W = 84, CELL_H = 44, LEFT = 90, TOP = 56, BOTTOM = 52, TITLE_W = 330 };

/* 0 red, 1 green, through yellow; the count is in the cell, so colour is never alone. */
static void cell(FILE *f, int x, int y, uint32_t found, uint32_t asked) {
    double share = asked ? (double)found / asked : 0;
    int red = share < 0.5 ? 214 : (int)(214 - (share - 0.5) * 2 * 150);
    int green = share < 0.5 ? (int)(70 + share * 2 * 110) : 180;
    if (asked)
        fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"rgb(%d,%d,80)\"/>\n",
                x, y, CELL_W - 2, CELL_H - 2, red, green);
    else
        fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#ddd\"/>\n", x, y,
                CELL_W - 2, CELL_H - 2);
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%u / %u</text>\n", x + CELL_W / 2,
            y + CELL_H / 2 + 4, found, asked);
}

static void escape(FILE *f, const char *s) {
    for (; *s; s++) {
        if (*s == '<')
            fputs("&lt;", f);
        else if (*s == '&')
            fputs("&amp;", f);
        else
            fputc(*s, f);
    }
}

td_status td_needle_svg(const struct td_needle_grid *g, const char *title, const char *path,
                        struct td_error *err) {
    FILE *f = fopen(path, "we");
    if (!f) return td_fail(err, TD_IO, "%s: %s", path, strerror(errno));
    int cells = g->n_lengths * CELL_W, width = LEFT + (cells > TITLE_W ? cells : TITLE_W) + 20;
    int height = TOP + g->n_depths * CELL_H + BOTTOM;
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"13\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
            "<text x=\"%d\" y=\"26\" font-size=\"15\">",
            width, height, LEFT);
    escape(f, title);
    fputs("</text>\n", f);
    for (int i = 0; i < g->n_lengths; i++)
        fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%u</text>\n",
                LEFT + i * CELL_W + CELL_W / 2, TOP + g->n_depths * CELL_H + 20, g->lengths[i]);
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">prompt tokens</text>\n",
            LEFT + g->n_lengths * CELL_W / 2, TOP + g->n_depths * CELL_H + 42);
    for (int j = 0; j < g->n_depths; j++) {
        fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%u %%</text>\n", LEFT - 10,
                TOP + j * CELL_H + CELL_H / 2 + 4, g->depths[j]);
        for (int i = 0; i < g->n_lengths; i++)
            cell(f, LEFT + i * CELL_W, TOP + j * CELL_H, g->found[i * g->n_depths + j],
                 g->asked[i * g->n_depths + j]);
    }
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">depth</text>\n</svg>\n", LEFT - 10,
            TOP - 10);
    int bad = ferror(f);
    if (fclose(f) != 0 || bad) return td_fail(err, TD_IO, "%s: %s", path, strerror(errno));
    return TD_OK;
}
