/* Intrusive doubly linked list: the owner embeds a td_link, nothing is allocated. A list head is
 * a td_link that points at itself. Removing an unlinked link is a no-op, so retire paths may run
 * twice. */
#ifndef TD_COMMON_BASE_LIST_H
#define TD_COMMON_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct td_link {
    struct td_link *prev, *next;
};

#define TD_CONTAINER(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

static inline void td_list_init(struct td_link *l) {
    l->prev = l->next = l;
}

static inline bool td_list_empty(const struct td_link *head) {
    return head->next == head;
}

static inline void td_list_push_back(struct td_link *head, struct td_link *l) {
    l->prev = head->prev;
    l->next = head;
    head->prev->next = l;
    head->prev = l;
}

static inline void td_list_remove(struct td_link *l) {
    l->prev->next = l->next;
    l->next->prev = l->prev;
    td_list_init(l);
}

#define TD_LIST_EACH(head, it) for (struct td_link *it = (head)->next; it != (head); it = it->next)
#define TD_LIST_EACH_SAFE(head, it, tmp)                                                           \
    for (struct td_link *it = (head)->next, *tmp = it->next; it != (head); it = tmp, tmp = it->next)

#endif
