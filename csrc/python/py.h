/* The thin binding: check arguments, borrow pointers, release the GIL, one vm_ call, raise. No arithmetic.
 * One file per type; py_module.c puts them together. */
#ifndef VM_PY_H
#define VM_PY_H

#include "py_shared.h"

#include "../vm.h"

/* Converts an architecture to a dict, and back to a vm_arch (for PyArg_ParseTuple's O&). */
PyObject *vm_py_arch_to_dict(const vm_arch *arch);
int vm_py_to_arch(PyObject *dict, void *arch);
/* Reads tuples (module, until, name, bytes, by, row_bytes=0, row_flops=0, lives=0) into vm_passings. The caller frees
 * its items with PyMem_Free. Returns: a new reference that keeps their texts, NULL with an exception set. */
PyObject *vm_py_to_passings(PyObject *given, void *passings);
/* The same of tuples (module, rank, rows, columns) and vm_companions. */
PyObject *vm_py_to_companions(PyObject *given, void *companions);
/* Returns: a set of the CPU's kernels, NULL with an exception set. name: NULL or "" for the best usable one. */
const vm_backend *vm_py_backend(const char *name, vm_dtype dtype, vm_precision precision);
/* For PyArg_ParseTuple's O&: a vm_precision. */
int vm_py_to_precision(PyObject *name, void *out);
/* For PyArg_ParseTuple's O&: an unsigned, from 1 to VM_PY_THREADS. */
int vm_py_to_threads(PyObject *number, void *out);
enum { VM_PY_THREADS = 1024 };
/* A tuple of integers. */
PyObject *vm_py_sizes(const size_t *size, size_t count);

/* Threads. Simulations (CachingAllocator, Script, Play, Trace, Workspace) are read and changed with the GIL held. No
 * pointer into them is kept while Python code may run: it may append to their lists, but removes nothing. A Model has
 * a lock (py_model.h), because its runs release the GIL. vaemem._cuda.Backend has none: its C locks itself, without
 * the GIL. Accounts (mem.c) lock themselves too. */

/* A convolution: (dtype, n, c, h, w, k, r, stride, padding, layout), optionally followed by (dilation, groups,
 * output_padding, depth). r, stride, padding, dilation and output_padding are an int, or one for each dimension.
 * output_padding is None unless transposed; depth is 0 with two dimensions. For PyArg_ParseTuple's O&, and back. */
struct vm_conv;
int vm_py_to_conv(PyObject *question, void *conv);
PyObject *vm_py_from_conv(const struct vm_conv *conv);
/* Returns: a list of convolutions, of a trace or a script. */
PyObject *vm_py_convs(const struct vm_conv *conv, size_t count);

/* Returns: a new array of a sequence's integers, for PyMem_Free; NULL with an exception set. name: of the argument. */
uint64_t *vm_py_to_numbers(const char *name, PyObject *sequence, size_t *count);
/* Returns: a tuple of integers; NULL with an exception set. */
PyObject *vm_py_numbers(const uint64_t *number, size_t count);
/* For vm_py_list: an item of an array of uint64_t. */
PyObject *vm_py_number_item(const void *numbers, size_t i);

/* py_allocator.c: raises allocator.OutOfMemoryError with vm_error() and the figures. */
struct vm_talloc;
struct vm_talloc_oom;
void vm_py_raise_full(PyObject *allocator, const struct vm_talloc_oom *oom);
/* The simulated allocator inside a CachingAllocator, borrowed. NULL: TypeError. */
struct vm_talloc *vm_py_allocator(PyObject *object);

/* py_trace.c: the trace inside a Trace, borrowed. NULL: TypeError. */
struct vm_trace;
struct vm_trace *vm_py_trace(PyObject *object);
/* py_script.c: the script inside a Script, borrowed; NULL without an exception if object is no Script. */
struct vm_script;
struct vm_script *vm_py_script(PyObject *object);
/* Returns: {id: handle} of the storages that a call leaves, by their ids in the trace. */
struct vm_event;
PyObject *vm_py_left(const struct vm_script *script, const struct vm_event *call);
/* Wraps a trace in a Trace, a type of the module. Owns the trace from now on, even on failure. */
PyObject *vm_py_wrap_trace(PyTypeObject *type, struct vm_trace *trace);

/* The module's contents, by file. */
extern PyType_Spec vm_py_model_type, vm_py_trace_type, vm_py_script_type, vm_py_play_type, vm_py_program_type,
    vm_py_column_type, vm_py_profile_type, vm_py_catalogue_type, vm_py_workspace_type;
extern PyMethodDef vm_py_unpickle[], vm_py_convolutions[], vm_py_judges[];
int vm_py_add_allocator(PyObject *module); /* with its exception; -1 with one set */

#endif
