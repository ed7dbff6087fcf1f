/* Whether a run fits a card: the one place that decides it, from numbers alone, whoever's code runs.
 *
 *   script, played on the card (process.h) -> what the run takes there, or that it runs out
 *   readings with other workspaces, and a margin -> the bound
 *   these numbers -> fits, tight or does not fit, and why */
#ifndef VM_JUDGE_H
#define VM_JUDGE_H

#include "process.h"

/* The bound of a process that is predicted to reserve `reserved` bytes: a 16th more and 20 MiB, for what else ran
 * before. The `exact` ones, such as weights, get no 16th. Returns UINT64_MAX if the bound needs more than 64 bits.
 *
 * Of the seed table's rows, with their own workspaces, one is 3.7% above its prediction, two are 2.4% and the rest 0.7%
 * or less; a 16th is the largest of them with room for sizes that were not measured. A small run may meet one more of
 * the allocator's large segments. */
uint64_t vm_judge_bound(uint64_t reserved, uint64_t exact);

/* Of a phase: bytes on the card that its reading leaves out, such as memory outside PyTorch, or the baseline; and how
 * many bytes of its reading are exact, such as weights. */
typedef struct vm_judge_phase {
    uint64_t beside, exact;
} vm_judge_phase;

/* What a run takes: as it was played; the least and the most with any of several sets of workspaces; and the bound of
 * all of them. */
typedef struct vm_takes {
    uint64_t own, least, most, bound;
} vm_takes;

/* What the phases take that a process's readings from number `first` on tell. above: the bytes beyond each reading's
 * baseline count. row: [rows][script->convs], overwritten: other sets of workspaces that may be the true ones. The
 * first `likely` of them count for the least and the most, and all count for the bound. */
vm_status vm_judge_rows(vm_process *p, const vm_judge_phase *phase, size_t first, size_t phases, bool above,
                        uint64_t *row, size_t rows, size_t likely, vm_takes *out);

typedef enum vm_verdict { VM_DOES_NOT_FIT, VM_TIGHT, VM_FITS, VM_VERDICTS } vm_verdict;
extern const char *const vm_verdict_name[VM_VERDICTS];

/* Why a run is tight. */
typedef enum vm_reason {
    VM_REASON_NONE,
    VM_REASON_GUESSES,  /* it goes through only with plans of cuDNN's that are not known */
    VM_REASON_NO_ROOM,  /* it takes more where there is room, and goes through because PyTorch gives its cache back */
    VM_REASON_MARGINAL, /* by its bound it may take more than there is */
    VM_REASON_UNTRIED,  /* it rests on something that nobody has tried */
    VM_REASONS
} vm_reason;
extern const char *const vm_reason_name[VM_REASONS];

/* How a run uses a card, in bytes. */
typedef struct vm_card_use {
    bool fits;          /* it goes through on this card, as it was played */
    bool guesses;       /* only with plans of cuDNN's that are not known */
    bool untried;       /* it rests on something that nobody has tried */
    uint64_t available; /* what the card gives it */
    uint64_t kept_more; /* how much less that may be, because the operating system keeps more */
    uint64_t most;      /* bytes that the run takes on a card with room for everything */
    /* Whether the bound is at least `bytes`. It may take long, so it is called last, and only if all else fits. */
    bool (*may_take)(void *context, uint64_t bytes);
    void *context;
} vm_card_use;

vm_verdict vm_judge(const vm_card_use *use, vm_reason *why);

#endif
