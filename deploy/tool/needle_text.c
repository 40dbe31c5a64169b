/* Sentences, facts and questions of needle_text.h. */
#include "deploy/tool/needle_text.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

static const char *const people[] = {
    "baker",    "captain", "carpenter", "clerk",  "cook",    "doctor",  "driver", "engineer",
    "farmer",   "fisher",  "gardener",  "guard",  "hunter",  "judge",   "lawyer", "librarian",
    "merchant", "miller",  "miner",     "monk",   "nurse",   "painter", "pilot",  "sailor",
    "singer",   "smith",   "student",   "tailor", "teacher", "writer"};
static const char *const verbs[] = {"borrowed", "carried",  "cleaned",  "counted", "described",
                                    "dropped",  "folded",   "followed", "forgot",  "found",
                                    "hid",      "measured", "moved",    "opened",  "packed",
                                    "painted",  "repaired", "returned", "sold",    "watched"};
static const char *const adjectives[] = {
    "brave",  "bright", "broken",  "careful", "cold",  "common", "curious", "distant",
    "early",  "empty",  "famous",  "gentle",  "heavy", "hidden", "hungry",  "late",
    "narrow", "noisy",  "old",     "polite",  "quiet", "rusty",  "simple",  "small",
    "smooth", "steady", "strange", "tired",   "warm",  "wooden"};
static const char *const objects[] = {"barrel", "basket", "bell",    "blanket", "boat",   "book",
                                      "bottle", "box",    "broom",   "bucket",  "carpet", "chair",
                                      "clock",  "coat",   "curtain", "hammer",  "kettle", "key",
                                      "ladder", "lamp",   "letter",  "map",     "mirror", "rope",
                                      "shovel", "stove",  "table",   "wagon",   "wheel",  "window"};
static const char *const places[] = {"barn",   "bridge",  "castle", "cellar",  "church",
                                     "forest", "garden",  "harbor", "kitchen", "library",
                                     "market", "mill",    "museum", "river",   "school",
                                     "square", "station", "tower",  "valley",  "workshop"};
static const char *const times[] = {/* capital first letter at the start of a sentence */
                                    "after dinner",     "at noon",       "before sunrise",
                                    "during the storm", "every spring",  "for an hour",
                                    "in the morning",   "in the rain",   "last winter",
                                    "near midnight",    "without a word"};
static const char *const words[] = {
    "ACORN",   "AGATE",   "ALBUM",   "ALDER",   "AMBER",   "ANVIL",   "APPLE",   "APRON",
    "ARBOR",   "ARROW",   "ASPEN",   "ATLAS",   "AZURE",   "BADGE",   "BASIL",   "BEACH",
    "BEACON",  "BERRY",   "BIRCH",   "BISON",   "BLAZE",   "BRASS",   "BREAD",   "BRICK",
    "BRIDGE",  "BRINE",   "BROOK",   "CABIN",   "CAMEL",   "CANDLE",  "CANOE",   "CANYON",
    "CARGO",   "CASTLE",  "CEDAR",   "CHALK",   "CHERRY",  "CIDER",   "CLAY",    "CLIFF",
    "CLOUD",   "CLOVER",  "COBALT",  "COMET",   "COPPER",  "CORAL",   "COTTON",  "COYOTE",
    "CRANE",   "CROWN",   "CRYSTAL", "DAISY",   "DELTA",   "DESERT",  "DIAMOND", "DINGO",
    "DOLPHIN", "DRAGON",  "DRIFT",   "DRUM",    "EAGLE",   "EARTH",   "EBONY",   "ECHO",
    "ELBOW",   "ELDER",   "EMBER",   "EMERALD", "ENGINE",  "FABLE",   "FALCON",  "FEATHER",
    "FENCE",   "FERN",    "FIDDLE",  "FLAME",   "FLINT",   "FLORA",   "FOREST",  "FOSSIL",
    "FOX",     "FROST",   "GALAXY",  "GARNET",  "GINGER",  "GLACIER", "GRANITE", "GRAPE",
    "GRAVEL",  "GROVE",   "HARBOR",  "HARP",    "HAVEN",   "HAWK",    "HAZEL",   "HERON",
    "HICKORY", "HOLLOW",  "HONEY",   "HORIZON", "INDIGO",  "IRIS",    "IRON",    "ISLAND",
    "IVORY",   "IVY",     "JADE",    "JASMINE", "JASPER",  "JUNGLE",  "JUNIPER", "KETTLE",
    "KITE",    "KOALA",   "LAGOON",  "LANTERN", "LARK",    "LAUREL",  "LAVA",    "LEMON",
    "LILAC",   "LIME",    "LINEN",   "LION",    "LOTUS",   "LUNAR",   "LYNX",    "MAGNET",
    "MANGO",   "MAPLE",   "MARBLE",  "MARSH",   "MEADOW",  "MELON",   "METEOR",  "MINT",
    "MIRROR",  "MOON",    "MOSS",    "MUSTANG", "NEBULA",  "NECTAR",  "NEEDLE",  "NICKEL",
    "NORTH",   "NOVA",    "OAK",     "OASIS",   "OCEAN",   "OLIVE",   "OMEGA",   "ONYX",
    "OPAL",    "ORBIT",   "ORCHID",  "OTTER",   "OWL",     "OYSTER",  "PALM",    "PANDA",
    "PAPER",   "PEACH",   "PEARL",   "PEBBLE",  "PEPPER",  "PILOT",   "PINE",    "PLANET",
    "PLUM",    "POLAR",   "POND",    "POPPY",   "PRAIRIE", "PRISM",   "QUARTZ",  "QUILL",
    "RABBIT",  "RAIN",    "RAVEN",   "REEF",    "RIDGE",   "RIVER",   "ROBIN",   "ROCKET",
    "ROSE",    "RUBY",    "SABLE",   "SADDLE",  "SAFFRON", "SAGE",    "SALMON",  "SAPPHIRE",
    "SATIN",   "SEQUOIA", "SHADOW",  "SIERRA",  "SILK",    "SKY",     "SLATE",   "SNOW",
    "SOLAR",   "SPARROW", "SPRUCE",  "STAR",    "STONE",   "STORM",   "SUMMIT",  "SUNSET",
    "SWAN",    "TANGO",   "TEAK",    "TEMPLE",  "THISTLE", "THUNDER", "TIGER",   "TOPAZ",
    "TULIP",   "TUNDRA",  "TURTLE",  "VALLEY",  "VELVET",  "VOYAGE",  "WALNUT",  "WILLOW",
    "WINTER",  "WOLF",    "YARROW",  "ZEBRA",   "ZENITH",  "ZEPHYR",  "ZINC"};
static const char *const names[] = {
    "Ada",   "Alan",  "Anna",  "Aron",  "Bella", "Boris",  "Carl",  "Cora",  "Dana",  "Dora",
    "Edgar", "Elena", "Emil",  "Erika", "Felix", "Fiona",  "Frank", "Greta", "Hanna", "Hugo",
    "Ida",   "Igor",  "Irene", "Ivan",  "Jana",  "Julia",  "Karl",  "Kira",  "Lara",  "Lena",
    "Leo",   "Lukas", "Maria", "Mark",  "Mila",  "Nadia",  "Nils",  "Nora",  "Olga",  "Oscar",
    "Paul",  "Petra", "Quinn", "Ralf",  "Rosa",  "Ruth",   "Sara",  "Simon", "Sofia", "Tara",
    "Theo",  "Tina",  "Ugo",   "Ulla",  "Vera",  "Victor", "Wanda", "Yara",  "Zoe"};
static const char *const cities[] = {
    "Athens",  "Berlin", "Bern",  "Boston", "Cairo",  "Dakar",  "Dublin", "Geneva", "Hanoi",
    "Havana",  "Kyoto",  "Lagos", "Lisbon", "Lyon",   "Madrid", "Milan",  "Minsk",  "Naples",
    "Oslo",    "Paris",  "Porto", "Prague", "Quito",  "Riga",   "Rome",   "Seoul",  "Sydney",
    "Tallinn", "Tokyo",  "Tunis", "Turin",  "Venice", "Vienna", "Warsaw", "Zagreb", "Zurich"};
static const char *const colors[] = {"black", "blue",   "brown", "crimson", "gold", "green",
                                     "grey",  "orange", "pink",  "purple",  "red",  "silver",
                                     "teal",  "violet", "white", "yellow"};
static const char *const kind_names[TD_NEEDLE_KINDS] = {"secret code", "special magic number",
                                                        "home city", "favorite color"};

/* splitmix64: small, and its state is the seed itself. */
static uint64_t draw(uint64_t *s) {
    uint64_t z = (*s += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint32_t below(uint64_t *s, size_t n) {
    return (uint32_t)(draw(s) % n);
}

#define PICK(s, list) list[below(s, COUNT(list))]

static int filler(uint64_t *s, char *out, size_t cap) {
    char time[32];
    switch (below(s, 4)) {
    case 0:
        return snprintf(out, cap, "A %s %s a %s %s near the %s.", PICK(s, people), PICK(s, verbs),
                        PICK(s, adjectives), PICK(s, objects), PICK(s, places));
    case 1:
        return snprintf(out, cap, "Nobody in the %s %s the %s %s.", PICK(s, places), PICK(s, verbs),
                        PICK(s, adjectives), PICK(s, objects));
    case 2:
        return snprintf(out, cap, "The %s %s %s the %s %s.", PICK(s, adjectives), PICK(s, people),
                        PICK(s, verbs), PICK(s, objects), PICK(s, times));
    default:
        snprintf(time, sizeof time, "%s", PICK(s, times));
        time[0] = (char)(time[0] - 'a' + 'A');
        return snprintf(out, cap, "%s, the %s and the %s %s the %s.", time, PICK(s, people),
                        PICK(s, people), PICK(s, verbs), PICK(s, objects));
    }
}

struct fact {
    enum td_needle_kind kind;
    const char *name;
    char value[40];
};

static void make_fact(uint64_t *s, enum td_needle_kind kind, struct fact *f) {
    f->kind = kind;
    if (kind == TD_NEEDLE_CODE || kind == TD_NEEDLE_NUMBER) {
        f->name = below(s, 5) ? PICK(s, words) : PICK(s, names);
        snprintf(f->value, sizeof f->value, "%s-%04u-%s", PICK(s, words), below(s, 10000),
                 PICK(s, words));
    } else {
        f->name = PICK(s, names);
        snprintf(f->value, sizeof f->value, "%s",
                 kind == TD_NEEDLE_CITY ? PICK(s, cities) : PICK(s, colors));
    }
}

static int say_fact(const struct fact *f, char *out, size_t cap) {
    return snprintf(out, cap, "The %s of %s is %s.", kind_names[f->kind], f->name, f->value);
}

/* ---- sentences of one prompt, in order ---- */

struct sentences {
    char (*text)[112];
    uint32_t *tokens;
    uint32_t n, cap;
};

static bool put(struct sentences *l, uint32_t at, const char *text, uint32_t tokens) {
    if (l->n == l->cap) return false;
    memmove(&l->text[at + 1], &l->text[at], (l->n - at) * sizeof *l->text);
    memmove(&l->tokens[at + 1], &l->tokens[at], (l->n - at) * sizeof *l->tokens);
    snprintf(l->text[at], sizeof *l->text, "%s", text);
    l->tokens[at] = tokens;
    l->n++;
    return true;
}

/* Tokens of a sentence as it stands in the text, with the space before it: BPE pieces never cross
 * that space, so sentence counts add up to the text's count. */
static uint32_t cost(td_needle_count_fn *count, void *user, const char *sentence) {
    char buf[128];
    int n = snprintf(buf, sizeof buf, " %s", sentence);
    return count(user, buf, (size_t)n);
}

static td_status join(const struct sentences *l, struct td_needle_prompt *p, struct td_error *err) {
    size_t cap = 64 + (size_t)l->n * sizeof *l->text + sizeof p->question;
    p->text = malloc(cap);
    if (!p->text) return td_fail(err, TD_NO_MEMORY, "prompt of %zu bytes: out of memory", cap);
    size_t at = (size_t)snprintf(p->text, cap, "Read the notes.");
    for (uint32_t i = 0; i < l->n; i++)
        at += (size_t)snprintf(p->text + at, cap - at, " %s", l->text[i]);
    at += (size_t)snprintf(p->text + at, cap - at, "\n\n%s", p->question);
    p->len = at;
    return TD_OK;
}

/* Index before which the needle goes so that `spec` is met. */
static uint32_t needle_place(const struct td_needle_spec *spec, const struct sentences *l,
                             uint32_t filler_tokens, uint32_t after, uint32_t repeat) {
    if (spec->tail_tokens) {
        uint32_t at = l->n, behind = after;
        while (at > 0 && behind + l->tokens[at - 1] <= spec->tail_tokens)
            behind += l->tokens[--at];
        return at;
    }
    uint64_t target = (uint64_t)filler_tokens * spec->depth / 100;
    if (spec->repeats > 1)
        target = (uint64_t)filler_tokens * (2 * repeat + 1) / (2 * spec->repeats);
    uint64_t before = 0;
    uint32_t at = 0;
    while (at < l->n && before + l->tokens[at] <= target)
        before += l->tokens[at++];
    return at;
}

static td_status fill(const struct td_needle_spec *spec, td_needle_count_fn *count, void *user,
                      struct sentences *l, struct td_needle_prompt *p, struct td_error *err) {
    uint64_t s = spec->seed;
    char buf[112];
    struct fact needle, other;
    make_fact(&s, (enum td_needle_kind)below(&s, TD_NEEDLE_KINDS), &needle);
    snprintf(p->question, sizeof p->question, "What is the %s of %s?", kind_names[needle.kind],
             needle.name);
    snprintf(p->answer, sizeof p->answer, "%s", needle.value);
    say_fact(&needle, buf, sizeof buf);
    uint32_t repeats = spec->repeats ? spec->repeats : 1;
    uint32_t needle_tokens = cost(count, user, buf);
    char tail[112];
    int tail_len = snprintf(tail, sizeof tail, "\n\n%s", p->question);
    uint32_t question_tokens = count(user, tail, (size_t)tail_len);
    /* four tokens of the chat frame: start, user, assistant, end of thinking */
    uint32_t used =
        4 + count(user, "Read the notes.", 15) + question_tokens + repeats * needle_tokens;
    if (used > spec->tokens)
        return td_fail(err, TD_INVALID,
                       "a prompt of %u tokens cannot hold needle and question: they take %u",
                       spec->tokens, used);
    uint32_t filler_tokens = 0, facts = 0;
    for (uint32_t misses = 0; misses < 64 && l->n + repeats < l->cap;) {
        bool fact = facts < spec->look_alikes;
        if (fact) {
            do
                make_fact(&s, (enum td_needle_kind)(facts % TD_NEEDLE_KINDS), &other);
            while (strcmp(other.name, needle.name) == 0);
            say_fact(&other, buf, sizeof buf);
        } else
            filler(&s, buf, sizeof buf);
        uint32_t c = cost(count, user, buf);
        if (used + c > spec->tokens) {
            if (fact)
                return td_fail(err, TD_INVALID,
                               "a prompt of %u tokens holds %u look-alikes, not %u", spec->tokens,
                               facts, spec->look_alikes);
            misses++;
            continue;
        }
        /* look-alikes first, then filler around them, each at a random place */
        if (!put(l, below(&s, l->n + 1u), buf, c)) break;
        facts += fact;
        used += c;
        filler_tokens += c;
    }
    say_fact(&needle, buf, sizeof buf);
    for (uint32_t r = repeats; r-- > 0;) {
        uint32_t at = needle_place(spec, l, filler_tokens, 2 + question_tokens + needle_tokens, r);
        if (!put(l, at, buf, needle_tokens))
            return td_fail(err, TD_TOO_LONG, "a prompt of %u tokens has more than %u sentences",
                           spec->tokens, l->cap);
    }
    return TD_OK;
}

td_status td_needle_build(const struct td_needle_spec *spec, td_needle_count_fn *count, void *user,
                          struct td_needle_prompt *ret, struct td_error *err) {
    /* the shortest sentence has 5 tokens */
    struct sentences l = {.cap = spec->tokens / 5 + spec->repeats + 16};
    struct td_needle_prompt p = {0};
    l.text = malloc(l.cap * sizeof *l.text);
    l.tokens = malloc(l.cap * sizeof *l.tokens);
    td_status st = l.text && l.tokens ? fill(spec, count, user, &l, &p, err)
                                      : td_fail(err, TD_NO_MEMORY,
                                                "prompt of %u tokens: out of memory", spec->tokens);
    if (st == TD_OK) st = join(&l, &p, err);
    free(l.text);
    free(l.tokens);
    if (st == TD_OK) {
        p.tokens = 4 + count(user, p.text, p.len); /* 4: the chat frame */
        *ret = p;
    }
    return st;
}
