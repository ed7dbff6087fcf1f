/* Workspaces of PyTorch's convolutions, from recorded data: profiles of cuDNN's answers, and rules
 * (vaemem/prediction/profiles.py describes the files).
 *
 *   profile  (channels, filter, stride, padding, frames, kind) -> decision tree -> formula
 *   rule     a set of convolutions -> formula, or the answer of a profile
 *   lookup   PyTorch's own convolutions, otherwise the first rule or profile that answers, otherwise a guess */
#ifndef VM_LOOKUP_H
#define VM_LOOKUP_H

#include "../../../kernels/cudnn/conv.h"
#include "../../vm.h"
#include "../sizes.h"

/* Sizes in formulas and trees, in this order: input, output and filter in bytes, each rounded up to 16, then with the
 * channels padded to 16 bytes; output pixels of the batch and of one image; height and width of the input; the batch;
 * what P lacks to a multiple of 128; output pixels of the part.
 *
 * If input or output has more than 2^31 elements, cuDNN (9.8 to 9.28 were checked) chooses a plan for the whole batch.
 * It then runs the plan on parts: as many images as fit in 2^31 elements. The tensors and p describe one part, the
 * others the batch. */
enum { VM_SIZE_i, VM_SIZE_o, VM_SIZE_f, VM_SIZE_I, VM_SIZE_O, VM_SIZE_F, VM_TENSORS };
enum { VM_SIZE_P = VM_TENSORS, VM_SIZE_Q, VM_SIZE_h, VM_SIZE_w, VM_SIZE_n, VM_SIZE_m, VM_SIZE_p, VM_SIZES };
#define VM_SIZE_NAMES "iofIOFPQhwnmp"

/* Bytes: each tensor times its count, + 128 * (index * Q / 128 + 1) if index is set, + per_tile * ceil(p / tile) if
 * tile is set, + constant. */
typedef struct vm_formula {
    uint32_t times[VM_TENSORS];
    int64_t index, tile, per_tile, constant; /* the constant may be negative */
} vm_formula;

/* Images that cuDNN computes at a time: the batch, or fewer if its tensors exceed 2^31 elements. 0 if one image has
 * 2^31 or more elements: cuDNN's plans then take no workspace. */
vm_status vm_conv_part(const vm_conv *conv, uint64_t *part);
/* VM_EOVERFLOW if a size or the result exceeds 64 bits. */
vm_status vm_conv_sizes(const vm_conv *conv, uint64_t size[VM_SIZES]);
vm_status vm_formula_bytes(const vm_formula *formula, const uint64_t size[VM_SIZES], uint64_t *bytes);
/* One image's im2col columns: every number that a filter multiplies, for each output pixel. 0 if the
 * columns are the input itself: a filter of one pixel, without stride or padding. */
vm_status vm_conv_columns(const vm_conv *conv, uint64_t *bytes);

/* ---- profiles ---- */

enum { VM_RULE_PAIRS = 16 };

typedef struct vm_rule {
    unsigned dtypes;                    /* one bit for each vm_dtype */
    int64_t r, stride;                  /* r: 0 for any */
    int64_t least, most;                /* pixels of the input */
    size_t pairs;                       /* of channels; 0: any channels */
    int64_t channels[VM_RULE_PAIRS][2]; /* of input and output */
    vm_formula formula;
    bool winograd; /* the workspace also has Winograd's transformed filter, as in strict float32 */
} vm_rule;

typedef struct vm_profile vm_profile;

/* strict: TF32 changes float32's answers (compute capability 8.0 and later). otherwise: used for convolutions without a
 * tree, or NULL; borrowed. */
vm_status vm_profile_new(bool strict, const vm_profile *otherwise, vm_profile **out);
void vm_profile_free(vm_profile *p); /* accepts NULL */
vm_status vm_profile_add_rule(vm_profile *p, const vm_rule *rule);
vm_status vm_profile_add_formula(vm_profile *p, const vm_formula *formula); /* NULL: no formula was recorded */
/* Adds a decision tree in the files' format (vaemem/prediction/profiles.py), after its formulas.
 * key: "128,128,3,1,1/float16 nhwc"; tree: "P400 h15 0 1 2". VM_EINVAL if one of them is malformed. */
vm_status vm_profile_add_tree(vm_profile *p, const char *key, const char *tree);

/* Which profile answered, and how. steps: 0 for the profile itself, 1 for its `otherwise`, and so on. rule: the rule's
 * index; VM_HOW_TREE: a tree answered; VM_HOW_LARGE: one image has 2^31 elements or more. */
enum { VM_HOW_TREE = -1, VM_HOW_LARGE = -2 };
typedef struct vm_profile_how {
    int steps, rule;
} vm_profile_how;

/* *found: whether the profile knows such a convolution. tf32: torch.backends.cudnn.allow_tf32. */
vm_status vm_profile_conv(const vm_profile *p, const vm_conv *conv, bool tf32, bool *found, uint64_t *bytes,
                          vm_profile_how *how);

/* ---- PyTorch's choice ---- */

typedef struct vm_lookup_torch {
    int sm;      /* compute capability, 89 for 8.9 */
    int cudnn;   /* 10000 * major + 100 * minor + patch; 0: unknown */
    int guessed; /* the version that guesses assume; set even if cudnn is unknown */
    int release; /* 100 * major + minor of PyTorch; 0: unknown */
    bool is_290; /* 2.9.0, which does not use cuDNN for 3d convolutions in half precision */
    bool is_off; /* torch.backends.cudnn.enabled is False */
} vm_lookup_torch;

/* Why PyTorch runs a convolution with its own code. */
typedef enum vm_own_conv {
    VM_OWN_NONE, /* cuDNN runs it */
    VM_OWN_BFLOAT16,
    VM_OWN_CONV3D,
    VM_OWN_LARGE,
    VM_OWN_DEPTHWISE,
    VM_OWN_OFF /* cuDNN, or MIOpen, is off */
} vm_own_conv;

/* ---- lookups ---- */

/* How to answer without a matching entry: the usual rule, nothing, the most that large convolutions were seen to take,
 * or im2col's columns. */
typedef enum vm_guess { VM_GUESS_RULE, VM_GUESS_LEAST, VM_GUESS_MOST, VM_GUESS_COLUMNS } vm_guess;

typedef struct vm_lookup vm_lookup;

vm_status vm_lookup_new(const vm_lookup_torch *torch, bool tf32, vm_guess guess, vm_lookup **out);
void vm_lookup_free(vm_lookup *l); /* accepts NULL */
/* Adds the next entry: a profile (rule NULL); or a rule with its formula (profile NULL); or a rule with a profile,
 * asked as with TF32. profile: borrowed until vm_lookup_free. */
vm_status vm_lookup_add(vm_lookup *l, const vm_rule *rule, const vm_profile *profile);

/* Two dimensions, square filters, one group and no dilation, by layout; and everything else. */
typedef enum vm_conv_form { VM_FORM_NCHW, VM_FORM_NHWC, VM_FORM_OTHER } vm_conv_form;

/* What answered: PyTorch's own code, otherwise the entry and how, otherwise (entry -1) the guess. */
typedef struct vm_source {
    vm_own_conv own;
    int entry;
    vm_profile_how how;
    const char *why;   /* the guess in words; NULL if there is none */
    vm_conv_form form; /* form of the guessed convolution */
} vm_source;

typedef struct vm_known {
    vm_conv conv;
    uint64_t bytes, next; /* next: of the plan that follows if these cannot be allocated */
    uint32_t source;      /* one of vm_lookup_sources */
    bool own;             /* PyTorch's own code runs it, which has no other plan */
} vm_known;

/* Looks each convolution up once. VM_EINVAL if its sizes, groups or filter are impossible. */
vm_status vm_lookup_conv(vm_lookup *l, const vm_conv *conv, vm_known *out);
/* All convolutions and all sources so far, in order of their first use. */
const vm_known *vm_lookup_known(const vm_lookup *l, size_t *count);
const vm_source *vm_lookup_sources(const vm_lookup *l, size_t *count);

#endif
