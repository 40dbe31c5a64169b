/* Files that hold secrets, and comparing secrets: what the cluster key and clients' keys share. */
#ifndef TD_COMMON_AUTH_SECRET_H
#define TD_COMMON_AUTH_SECRET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "common/base/status.h"

enum { TD_DIGEST_BYTES = 32 };

/* Reads `path` into bytes [cap]; *ret_n <= cap, and == cap says that the file may be longer.
 * `setting` names it in sentences, `how` ends the one about a missing file. CONFIG: it is missing,
 * not a regular file, of another user (than ours or root), or open to others: nobody but its owner
 * may write it, nobody outside owner and group may read it. */
TD_MUST_USE td_status td_secret_read(const char *setting, const char *path, const char *how,
                                     uint8_t *bytes, size_t cap, size_t *ret_n,
                                     struct td_error *err);
/* Its rule, for a process of user `as`: the file's kind, owner and mode, by what stat says. */
TD_MUST_USE td_status td_secret_allowed(const char *setting, const char *path,
                                        const struct stat *st, uid_t as, struct td_error *err);
/* Overwrites; not optimised away. */
void td_secret_wipe(void *bytes, size_t len);

/* SHA-256. INTERNAL: the library failed. */
TD_MUST_USE td_status td_secret_digest(const void *bytes, size_t len,
                                       uint8_t digest[TD_DIGEST_BYTES]);
/* Whether `len` bytes are equal, in a time that does not depend on where they differ. */
bool td_secret_equal(const void *a, const void *b, size_t len);

#endif
