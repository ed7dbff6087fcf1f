/* A module recorded once with PyTorch, as a program: what each of its calls takes and gives back, with every size a
 * polynomial in a few variables, to be played at any size without PyTorch.
 *
 * A program is read from lines of words, a kind and what it says:
 *
 *   name sdxl-unet
 *   variables n h w t
 *   derived h1 2 1 1 h         a variable that follows from others: 1 * ceil((1 h) / 2)
 *   call float16 bfloat16; 1 n = 1; 1 h != 2 h1
 *                              begins the steps of a call in these dtypes, where all of these cases hold
 *   size 1280 n h w + 640      a polynomial, below as s: sizes are counted from 0 within the call
 *   conv run s s s s s s s s 0
 *                              a convolution: dtype ("run" is the call's own), n, c, h, w, k, r, stride, padding;
 *                              whether it is NHWC
 *   attention run s s s s s s s s s 0 1 1 0 1 1 1
 *                              n, heads of queries, of keys, queries, keys, depth of these and of values, a mask's
 *                              elements, those of a row; is_causal, enable_gqa, whether there is a mask and of
 *                              booleans, which of queries, keys and values lie token by token (vm_heads)
 *   module +3:what -5 c2 a0 b7 l7 conv1=12 =12 /conv1=12
 *                              a distinct module call, the outermost last; vaemem/pipelines/programs.py explains words
 *
 * What can be wrong with a text is found when it is read: sizes, convolutions and modules that are not there, a give
 * without its take, modules that call themselves (each calls earlier ones alone), calls nested too deep or of too many
 * steps. Sizes that do not fit are found when it is played. A program never changes once it is read, so that threads
 * may share it. */
#ifndef VM_PROGRAM_H
#define VM_PROGRAM_H

#include "torch_trace.h"

/* The most names of variables, of calls nested in one another, and bytes of a module's path. */
enum { VM_PROGRAM_NAMES = 64, VM_PROGRAM_DEPTH = 64, VM_PROGRAM_PATH = 256 };

typedef struct vm_program vm_program;

/* text is copied. VM_EINVAL says the line. */
vm_status vm_program_read(const char *text, vm_program **out);
void vm_program_free(vm_program *p); /* accepts NULL */

/* How many variables are given. */
size_t vm_program_given(const vm_program *p);

/* A tensor that is on the device while a module is called and no longer. */
typedef struct vm_passing {
    const char *module, *name; /* borrowed; "": the outermost */
    uint64_t bytes;
    bool sent; /* accelerate's hooks send it, and empty the cache after each */
} vm_passing;

typedef struct vm_program_call {
    vm_dtype dtype;
    int64_t value[VM_PROGRAM_NAMES]; /* of what is given */
    vm_trace_gpu gpu;
    const vm_passing *passing; /* [passings], borrowed; sorted by module, those of one come in this order */
    size_t passings;
} vm_program_call;

/* What a call takes on a GPU, with its FLOPs. VM_EINVAL: a dtype or a case that was not recorded. */
vm_status vm_program_trace(const vm_program *p, const vm_program_call *call, vm_trace **out);

#endif
