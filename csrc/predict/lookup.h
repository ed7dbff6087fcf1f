/* How much workspace a convolution of PyTorch's takes, by what was recorded: profiles of cuDNN's answers, and rules
 * (vaemem/prediction/profiles.py says what their files hold).
 *
 *   profile  (channels, filter, stride, padding, frames, kind) -> decision tree -> formula
 *   rule     which convolutions -> formula, or the answer of a profile
 *   lookup   PyTorch's own convolutions, else the first of its rules and profiles that answers, else a guess; it
 *            remembers */
#ifndef VM_LOOKUP_H
#define VM_LOOKUP_H

#include "../../kernels/cudnn/conv.h"
#include "../vm.h"
#include "sizes.h"

/* What formulas and trees speak of, in their order: input, output and filter in bytes, each rounded up to 16, then with
 * the channels padded to 16 bytes; output pixels of the batch and of one image; height and width of the input; the
 * batch; what P lacks to a multiple of 128; output pixels of the part.
 *
 * If input or output has more than 2^31 elements, cuDNN (9.8 to 9.28 were asked) chooses a plan for the whole batch and
 * runs it on as many images at a time as have no more. The tensors and p are of one such part, the others of the
 * batch. */
enum { VM_SIZE_i, VM_SIZE_o, VM_SIZE_f, VM_SIZE_I, VM_SIZE_O, VM_SIZE_F, VM_TENSORS };
enum { VM_SIZE_P = VM_TENSORS, VM_SIZE_Q, VM_SIZE_h, VM_SIZE_w, VM_SIZE_n, VM_SIZE_m, VM_SIZE_p, VM_SIZES };
#define VM_SIZE_NAMES "iofIOFPQhwnmp"

/* Bytes: the tensors so often each, + 128 * (index * Q / 128 + 1) with an index, + per_tile * ceil(p / tile) with a
 * tile, + constant. */
typedef struct vm_formula {
    uint32_t times[VM_TENSORS];
    int64_t index, tile, per_tile, constant; /* the constant may be negative */
} vm_formula;

/* Images that cuDNN computes at a time: the batch, or fewer if that has tensors of more than 2^31 elements; 0 if a
 * single image has 2^31 or more, for which cuDNN's plans take no workspace. */
vm_status vm_conv_part(const vm_conv *conv, uint64_t *part);
/* VM_EOVERFLOW where a size, or the result, does not fit into 64 bits. */
vm_status vm_conv_sizes(const vm_conv *conv, uint64_t size[VM_SIZES]);
vm_status vm_formula_bytes(const vm_formula *formula, const uint64_t size[VM_SIZES], uint64_t *bytes);
/* One image's columns: for each pixel that the filters meet, all that a filter multiplies. A filter of one pixel
 * multiplies the input as it is, and needs none. */
vm_status vm_conv_columns(const vm_conv *conv, uint64_t *bytes);

/* ---- profiles ---- */

enum { VM_RULE_PAIRS = 16 };

typedef struct vm_rule {
    unsigned dtypes;                    /* one bit for each vm_dtype */
    int64_t r, stride;                  /* r: 0 for any */
    int64_t least, most;                /* pixels of the input */
    size_t pairs;                       /* of channels; 0: any */
    int64_t channels[VM_RULE_PAIRS][2]; /* of input and output */
    vm_formula formula;
} vm_rule;

typedef struct vm_profile vm_profile;

/* strict: whether TF32 makes a difference to float32 (compute capability 8.0 and later). otherwise: asked where the
 * profile has no tree, or NULL; borrowed. */
vm_status vm_profile_new(bool strict, const vm_profile *otherwise, vm_profile **out);
void vm_profile_free(vm_profile *p); /* accepts NULL */
vm_status vm_profile_add_rule(vm_profile *p, const vm_rule *rule);
vm_status vm_profile_add_formula(vm_profile *p, const vm_formula *formula); /* NULL: none was recorded */
/* Adds a decision tree, as the files hold it (vaemem/prediction/profiles.py). Its formulas are already there.
 * key: "128,128,3,1,1/float16 nhwc"; tree: "P400 h15 0 1 2". VM_EINVAL if one of them is something else. */
vm_status vm_profile_add_tree(vm_profile *p, const char *key, const char *tree);

/* Who answered. steps: 0 for the profile itself, 1 for its `otherwise`, and so on. rule: the rule's index, or one of
 * these: a tree answered, or one image has 2^31 elements or more. */
enum { VM_HOW_TREE = -1, VM_HOW_LARGE = -2 };
typedef struct vm_profile_how {
    int steps, rule;
} vm_profile_how;

/* *found: whether a convolution of its kind was recorded. tf32: torch.backends.cudnn.allow_tf32. */
vm_status vm_profile_conv(const vm_profile *p, const vm_conv *conv, bool tf32, bool *found, uint64_t *bytes,
                          vm_profile_how *how);

/* ---- PyTorch's choice ---- */

typedef struct vm_lookup_torch {
    int sm;      /* compute capability, 89 for 8.9 */
    int cudnn;   /* 10000 * major + 100 * minor + patch; 0 where none is known */
    int guessed; /* the cuDNN that guesses are for, which is some version where none is known */
    int release; /* 100 * major + minor of PyTorch; 0 where none is known */
    bool is_290; /* 2.9.0, which runs no 3d convolution in half precision by cuDNN */
} vm_lookup_torch;

/* Why PyTorch runs a convolution by code of its own. */
typedef enum vm_own_conv {
    VM_OWN_NONE, /* cuDNN runs it */
    VM_OWN_BFLOAT16,
    VM_OWN_CONV3D,
    VM_OWN_LARGE,
    VM_OWN_DEPTHWISE
} vm_own_conv;

/* ---- lookups ---- */

/* What answers where no entry does: the usual rule, nothing, the most that large convolutions were seen to take, or
 * im2col's columns. */
typedef enum vm_guess { VM_GUESS_RULE, VM_GUESS_LEAST, VM_GUESS_MOST, VM_GUESS_COLUMNS } vm_guess;

typedef struct vm_lookup vm_lookup;

vm_status vm_lookup_new(const vm_lookup_torch *torch, bool tf32, vm_guess guess, vm_lookup **out);
void vm_lookup_free(vm_lookup *l); /* accepts NULL */
/* What is asked next: a profile (rule NULL); where a rule applies, its formula (profile NULL), or a profile with TF32.
 * profile: borrowed until vm_lookup_free. */
vm_status vm_lookup_add(vm_lookup *l, const vm_rule *rule, const vm_profile *profile);

/* Two dimensions, square filters, one group and no dilation, by layout; and all others. */
typedef enum vm_conv_form { VM_FORM_NCHW, VM_FORM_NHWC, VM_FORM_OTHER } vm_conv_form;

/* Who answered: PyTorch's own code, else the entry and how, else (entry -1) the guess. */
typedef struct vm_source {
    vm_own_conv own;
    int entry;
    vm_profile_how how;
    const char *why;   /* the guess in words; NULL if there is none */
    vm_conv_form form; /* of what was guessed */
} vm_source;

typedef struct vm_known {
    vm_conv conv;
    uint64_t bytes, next; /* next: bytes if these cannot be had. cuDNN then has a plan that takes none */
    uint32_t source;      /* one of vm_lookup_sources */
    bool own;             /* PyTorch runs it by code of its own, which has no other plan */
} vm_known;

/* Each convolution is looked up once. VM_EINVAL where conv is no convolution: sizes, groups or a filter that cannot
 * be. */
vm_status vm_lookup_conv(vm_lookup *l, const vm_conv *conv, vm_known *out);
/* All convolutions and all sources so far, in the order in which they came. */
const vm_known *vm_lookup_known(const vm_lookup *l, size_t *count);
const vm_source *vm_lookup_sources(const vm_lookup *l, size_t *count);

#endif
