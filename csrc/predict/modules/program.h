/* A module recorded once with PyTorch, as a program: what each of its calls allocates and frees. Every size is a
 * polynomial in a few variables, so it can be played at any size without PyTorch.
 *
 * A program is read from lines of words, a kind and its arguments:
 *
 *   name sdxl-unet
 *   variables n h w t
 *   derived h1 2 1 1 h         a variable computed from others: 1 * ceil((1 h) / 2)
 *   call float16 bfloat16; 1 n = 1; 1 h != 2 h1
 *                              begins the steps of a call in these dtypes, if all these cases hold
 *   size 1280 n h w + 640      a polynomial, below as s: sizes are counted from 0 within the call
 *   conv run s s s s s s s s 0
 *                              a convolution: dtype ("run" is the call's own), n, c, h, w, k, r, stride, padding;
 *                              whether it is NHWC
 *   conv3 run s s s s s s s s s 0
 *                              the same for each of some frames; their number is the last size
 *   convolution run (22 s) 0 1 0
 *                              any: n, c, k, groups; of three dimensions each: the input, filter, stride, padding,
 *                              dilation, output padding; whether it is NHWC, has a depth, and is transposed
 *   attention run s s s s s s s s s 0 1 1 0 1 1 1
 *                              n, heads of queries, of keys, queries, keys, depth of these and of values, a mask's
 *                              elements, those of a row; is_causal, enable_gqa, whether there is a mask and of
 *                              booleans, which of queries, keys and values lie token by token (vm_heads)
 *   module +3:what -5 c2 a0 b7 l7 conv1=12 =12 /conv1=12
 *                              a distinct module call, the outermost last (words: recorded_modules.py)
 *
 * Reading finds every error in a text: missing sizes, convolutions and modules, a give without its take, modules that
 * call themselves (each calls only earlier ones), calls nested too deeply or with too many steps. Playing finds sizes
 * that overflow. A program never changes after it is read, so threads may share it. */
#ifndef VM_PROGRAM_H
#define VM_PROGRAM_H

#include "../trace/trace.h"

/* Most names of variables, nested calls, and bytes of a module's path. */
enum { VM_PROGRAM_NAMES = 64, VM_PROGRAM_DEPTH = 64, VM_PROGRAM_PATH = 256 };

typedef struct vm_program vm_program;

/* Copies text. VM_EINVAL: the message names the line. */
vm_status vm_program_read(const char *text, vm_program **out);
void vm_program_free(vm_program *p); /* accepts NULL */

/* Returns: how many variables the caller gives. */
size_t vm_program_given(const vm_program *p);

typedef struct vm_program_call {
    vm_dtype dtype;
    int64_t value[VM_PROGRAM_NAMES]; /* of the given variables */
    vm_trace_gpu gpu;
    vm_passings passing;
    vm_companions companion;
} vm_program_call;

/* Writes the trace of a call on a GPU, with its FLOPs. VM_EINVAL: a dtype or a case that was not recorded. */
vm_status vm_program_trace(const vm_program *p, const vm_program_call *call, vm_trace **out);

#endif
