/* How much workspace PyTorch's convolutions take on a card, and how much else they may take.
 *
 *   card, cuDNN, PyTorch -> workspace: a lookup (lookup.h) by rules, the nearest profile, those of other versions
 *   workspace, convolutions -> rows: every other plausible set of answers, for the band and the upper bound */
#ifndef VM_PLAUSIBLE_H
#define VM_PLAUSIBLE_H

#include "catalogue.h"

/* What a workspace is for. */
typedef struct vm_workspace_for {
    vm_card card;
    bool coarse;           /* the card stands for one without recorded answers of cuDNN */
    vm_lookup_torch torch; /* cudnn: the version that was named, or 0; sm and guessed are filled in */
    int shipped;           /* cuDNN that this PyTorch ships; 0: not known */
    bool tf32;
    vm_guess guess; /* VM_GUESS_RULE: cuDNN runs here. Otherwise it does not, and no profile answers */
} vm_workspace_for;

typedef struct vm_workspace vm_workspace;

/* rule: [rules], the card's own, copied; they come before the catalogue's. c: borrowed until vm_workspace_free. */
vm_status vm_workspace_new(vm_catalogue *c, const vm_workspace_for *of, const vm_card_rule *rule, size_t rules,
                           vm_workspace **out);
void vm_workspace_free(vm_workspace *w); /* accepts NULL */

/* What answers. Borrowed until vm_workspace_free. */
vm_lookup *vm_workspace_lookup(vm_workspace *w);

/* An entry of that lookup: a rule, numbered through the card's rules and then the catalogue's, or -1; and the number of
 * a recorded profile, or -1. */
typedef struct vm_workspace_entry {
    int rule, recorded;
} vm_workspace_entry;
vm_workspace_entry vm_workspace_entry_at(const vm_workspace *w, size_t entry);

/* Rows of bytes for `convs` convolutions, [count][convs], each once, without the workspace's own. Empty if nothing was
 * substituted. The array is scratch and becomes the caller's.
 *
 * They are the answers of each relative (catalogue.h), and the most that any of them says of each convolution, since an
 * unknown version may answer each as another version does. Before cuDNN 9.8: also inferred profiles, and the possible
 * rules. If a rule had to guess: the least and the most there can be. If the card is coarse: the answers of a card of
 * each kind, of the possible rules, and none at all. If an inferred profile answers, the only row is from the nearest
 * recorded version. On a card without cuDNN: nothing, or im2col's columns. every: for a process whose cuDNN is not
 * known. */
vm_status vm_workspace_rows(vm_workspace *w, bool every, const vm_conv *conv, size_t convs, uint64_t **row,
                            size_t *count);

#endif
