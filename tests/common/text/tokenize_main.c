/* The command `tandem tokenize` alone, for test_cmd_tokenize.py: no other tool has to build. */
#include "deploy/tool/tool.h"

int main(int argc, char **argv) {
    return td_cmd_tokenize(argc, argv);
}
