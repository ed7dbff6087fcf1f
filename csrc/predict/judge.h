/* Decides whether a run fits a card, from numbers alone, for every runtime.
 *
 *   script, played on the card (play.h) -> what the run takes there, or that it runs out
 *   readings with other workspaces, and a margin -> the bound
 *   these numbers -> fits, tight or does not fit, and why */
#ifndef VM_JUDGE_H
#define VM_JUDGE_H

#include "play.h"

/* The bound of a process that is predicted to reserve `reserved` bytes: one 16th more, plus 20 MiB for whatever ran
 * before. `exact` bytes, such as weights, get no 16th. Returns: UINT64_MAX if the bound needs more than 64 bits.
 *
 * With their own workspaces, one row of the seed table is 3.7% above its prediction, two are 2.4% above, the rest at
 * most 0.7%. A 16th covers the largest, with room for unmeasured sizes. A small run may need one more large segment. */
uint64_t vm_judge_bound(uint64_t reserved, uint64_t exact);

/* A phase, by the number of its reading. outside: bytes on the card that the reading leaves out, such as the baseline
 * or memory outside PyTorch. exact: bytes of the reading that are exact, such as weights. bound_only: counts for the
 * bound alone. */
typedef struct vm_judge_phase {
    size_t reading;
    uint64_t outside, exact;
    bool bound_only;
} vm_judge_phase;

/* Bytes that a run takes: as played; the least and the most over several sets of workspaces; and the bound of all. */
typedef struct vm_takes {
    uint64_t own, least, most, bound;
} vm_takes;

/* Sums up phases of a play. above: count only bytes beyond each reading's baseline. row: [rows][script->convs],
 * overwritten: other plausible sets of workspaces. The first `likely` rows count for the least and the most; all rows
 * count for the bound. */
vm_status vm_judge_rows(const vm_play *p, const vm_judge_phase *phase, size_t phases, bool above, uint64_t *row,
                        size_t rows, size_t likely, vm_takes *out);

/* Finds the smallest device, in pages of 2 MiB, on which the script of a play succeeds, with room for the memory
 * outside PyTorch. low: too few bytes; high: enough bytes, as far as known. If the script succeeds on some device and
 * fails on a larger one, there are several borders; the search finds one of them. first_only: as of
 * vm_play_elsewhere. */
vm_status vm_judge_least(const vm_play *p, bool first_only, uint64_t low, uint64_t high, uint64_t *least);

typedef enum vm_verdict { VM_DOES_NOT_FIT, VM_TIGHT, VM_FITS, VM_UNDECIDED, VM_VERDICTS } vm_verdict;
extern const char *const vm_verdict_name[VM_VERDICTS];

/* Why a run is tight. */
typedef enum vm_reason {
    VM_REASON_NONE,
    VM_REASON_GUESSES,  /* fits only with unknown plans of cuDNN's */
    VM_REASON_NO_ROOM,  /* takes more if there is room; fits because PyTorch frees its cache */
    VM_REASON_MARGINAL, /* its bound is above the available memory */
    VM_REASON_UNTRIED,  /* relies on something that nobody has tried */
    VM_REASONS
} vm_reason;
extern const char *const vm_reason_name[VM_REASONS];

/* How a run uses a card, in bytes. */
typedef struct vm_card_use {
    bool fits;          /* fits on this card, as played */
    bool guesses;       /* fits only with unknown plans of cuDNN's */
    bool untried;       /* relies on something that nobody has tried */
    uint64_t available; /* bytes that the card gives the run */
    uint64_t kept_more; /* bytes to subtract from it because the operating system may keep more */
    uint64_t most;      /* bytes that the run takes on a card with room for everything */
    uint64_t bound;     /* the most that the run takes; or as much of it as is known, */
    bool is_rough;      /* because the bound is slow to find */
} vm_card_use;

/* VM_UNDECIDED: the verdict depends on the rest of the bound. */
vm_verdict vm_judge(const vm_card_use *use, vm_reason *why);

#endif
