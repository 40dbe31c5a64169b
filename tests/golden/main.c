/* `tandem golden` as a program of its own, so that goldens need neither transfers nor router. */
#include "deploy/tool/tool.h"

int main(int argc, char **argv) {
    return td_cmd_golden(argc, argv);
}
