/* Text to socket address: Unix paths and numeric TCP endpoints. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/io/stream_internal.h"

enum { PORT_MAX = 65535 };

static td_status parse_tcp(const char *text, struct td_address *a, struct td_error *err) {
    const char *colon = strrchr(text, ':');
    char host[64];
    const char *from = text, *to = colon;
    if (colon && *from == '[' && to > from && to[-1] == ']') from++, to--;
    if (!colon || to <= from || (size_t)(to - from) >= sizeof host)
        return td_fail(err, TD_CONFIG, "\"%s\" is no address: expected /path or host:port", text);
    memcpy(host, from, (size_t)(to - from));
    host[to - from] = 0;
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (end == colon + 1 || *end || port > PORT_MAX)
        return td_fail(err, TD_CONFIG, "\"%s\": the port is not a number up to %d", text, PORT_MAX);
    if (uv_ip4_addr(host, (int)port, (struct sockaddr_in *)&a->tcp) != 0 &&
        uv_ip6_addr(host, (int)port, (struct sockaddr_in6 *)&a->tcp) != 0)
        return td_fail(err, TD_CONFIG, "\"%s\": the host is not a numeric address", text);
    return TD_OK;
}

td_status td_address_parse(const char *text, struct td_address *ret, struct td_error *err) {
    struct td_address a = {0};
    const char *path = strncmp(text, "unix:", 5) == 0 ? text + 5 : text;
    a.is_unix = path != text || *path == '/';
    if (a.is_unix) {
        size_t n = strlen(path);
        if (n == 0 || n >= sizeof a.path)
            return td_fail(err, TD_CONFIG, "socket path \"%s\" has %zu bytes, expected 1 to %zu",
                           path, n, sizeof a.path - 1);
        memcpy(a.path, path, n + 1);
    } else {
        TD_TRY(parse_tcp(text, &a, err));
    }
    *ret = a;
    return TD_OK;
}

td_status td_address_is_tcp(const char *address, bool *ret_tcp, struct td_error *err) {
    struct td_address a;
    TD_TRY(td_address_parse(address, &a, err));
    *ret_tcp = !a.is_unix;
    return TD_OK;
}
