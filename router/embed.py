"""A file as a C array, so that the router serves it without looking for it.
usage: embed.py FILE NAME > OUT.c"""
import pathlib
import sys

data = pathlib.Path(sys.argv[1]).read_bytes()
print(f"/* {pathlib.Path(sys.argv[1]).name}, by embed.py */\n#include <stddef.h>\n")
print(f"extern const char {sys.argv[2]}[];\nextern const size_t {sys.argv[2]}_n;")
print(f"const char {sys.argv[2]}[] = {{")
for at in range(0, len(data), 20):
    print(",".join(f"{b - 256 if b > 127 else b}" for b in data[at:at + 20]) + ",")
print(f"0}};\nconst size_t {sys.argv[2]}_n = {len(data)};")
