/* Reading and mapping files, with the sentences that go with what can go wrong. */
#include "kernels/model/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static td_status open_regular(const char *path, int *ret_fd, size_t *ret_size,
                              struct td_error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        td_status s = errno == ENOENT ? TD_NOT_FOUND : TD_IO;
        return td_fail(err, s, "%.300s: cannot be opened: %s", path, strerror(errno));
    }
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return td_fail(err, TD_IO, "%.300s: expected a regular file", path);
    }
    *ret_fd = fd;
    *ret_size = (size_t)st.st_size;
    return TD_OK;
}

td_status td_file_read(const char *path, size_t max, char **ret, size_t *ret_size,
                       struct td_error *err) {
    int fd;
    size_t size, got = 0;
    TD_TRY(open_regular(path, &fd, &size, err));
    if (size > max) {
        close(fd);
        return td_fail(err, TD_TOO_LONG, "%.250s: expected at most %zu bytes, found %zu", path, max,
                       size);
    }
    char *buf = malloc(size + 1);
    if (!buf) {
        close(fd);
        return td_fail(err, TD_NO_MEMORY, "%.250s: no memory for %zu bytes", path, size);
    }
    while (got < size) {
        ssize_t n = read(fd, buf + got, size - got);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        got += (size_t)n;
    }
    close(fd);
    if (got < size) {
        free(buf);
        return td_fail(err, TD_IO, "%.250s: expected %zu bytes, could read %zu", path, size, got);
    }
    buf[size] = '\0';
    *ret = buf;
    *ret_size = size;
    return TD_OK;
}

td_status td_file_map(const char *path, const uint8_t **ret, size_t *ret_size,
                      struct td_error *err) {
    int fd;
    size_t size;
    TD_TRY(open_regular(path, &fd, &size, err));
    if (size == 0) {
        close(fd);
        return td_fail(err, TD_FORMAT, "%.300s: the file is empty", path);
    }
    void *map = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    int e = errno;
    close(fd);
    if (map == MAP_FAILED)
        return td_fail(err, TD_IO, "%.300s: cannot be mapped: %s", path, strerror(e));
    *ret = map;
    *ret_size = size;
    return TD_OK;
}

void td_file_unmap(const uint8_t *map, size_t size) {
    if (map) munmap((void *)(uintptr_t)map, size);
}
