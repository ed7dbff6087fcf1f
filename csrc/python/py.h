/* The thin binding: check arguments, borrow pointers, release the GIL, one vm_ call, raise. No arithmetic here.
 * One file a type; py_module.c puts them together. */
#ifndef VM_PY_H
#define VM_PY_H

#include "py_shared.h"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL vaemem_core_array
#ifndef VM_PY_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "../vm.h"

/* An architecture as the dict that Python sees, and for PyArg_ParseTuple's O& back: a vm_arch. */
PyObject *vm_py_arch_to_dict(const vm_arch *arch);
int vm_py_to_arch(PyObject *dict, void *arch);
/* A set of the CPU's kernels. name: NULL or "" for the best usable one. NULL with an exception set. */
const vm_backend *vm_py_backend(const char *name, vm_dtype dtype, vm_precision precision);
/* For PyArg_ParseTuple's O&: a vm_precision. */
int vm_py_to_precision(PyObject *name, void *out);
/* For PyArg_ParseTuple's O&: an unsigned, from 1 to VM_PY_THREADS. */
int vm_py_to_threads(PyObject *number, void *out);
enum { VM_PY_THREADS = 1024 };
/* ml_dtypes' type, which NumPy knows by its name alone. */
bool vm_py_is_bfloat16(PyArrayObject *a);
/* A tuple of integers. */
PyObject *vm_py_sizes(const size_t *size, size_t count);

/* Threads. What simulates (CachingAllocator, Process, Trace, Workspace) is read and changed with the GIL held. No
 * pointer into it is kept while Python's code may run, which may add to what is listed, but takes nothing away. A
 * Model, whose runs give the GIL up, has a lock (py_model.h). vaemem._cuda.Backend has none: its C locks itself,
 * without the GIL. Accounts (mem.c) lock themselves too. */

/* A convolution's question: (dtype, n, c, h, w, k, r, stride, padding, layout), then, if any, (dilation, groups,
 * output_padding, depth); r, stride, padding, dilation and output_padding are an int, or one for each dimension,
 * output_padding None where nothing is transposed, depth 0 with two dimensions. For PyArg_ParseTuple's O&, and back. */
struct vm_conv;
int vm_py_to_conv(PyObject *question, void *conv);
PyObject *vm_py_from_conv(const struct vm_conv *conv);
/* A list of those of a trace. */
struct vm_trace;
PyObject *vm_py_convs(const struct vm_trace *trace);

/* py_allocator.c: raises allocator.OutOfMemoryError with vm_error()'s sentence and the figures. */
struct vm_talloc;
struct vm_talloc_oom;
void vm_py_raise_full(PyObject *allocator, const struct vm_talloc_oom *oom);
/* The simulated allocator inside a CachingAllocator, borrowed. NULL: TypeError. */
struct vm_talloc *vm_py_allocator(PyObject *object);

/* py_trace.c: the same of a Trace. */
struct vm_trace *vm_py_trace(PyObject *object);
/* py_process.c: all that a Process did, as one; NULL where it is no Process. */
const struct vm_trace *vm_py_script(PyObject *object);
/* A Trace, a type of the module's, around a trace, which it takes over even where it fails. */
PyObject *vm_py_wrap_trace(PyTypeObject *type, struct vm_trace *trace);

/* What the module has, by file. */
extern PyType_Spec vm_py_model_type, vm_py_trace_type, vm_py_process_type, vm_py_program_type, vm_py_profile_type,
    vm_py_catalogue_type, vm_py_workspace_type;
extern PyMethodDef vm_py_unpickle[], vm_py_convolutions[], vm_py_judges[];
int vm_py_add_allocator(PyObject *module); /* with its exception; -1 with one set */

#endif
