/* vaemem._core.Program: a recorded module, read from its text, and the traces and FLOPs of its calls. */
#include "../predict/modules/program.h"
#include "py.h"

typedef struct Program {
    PyObject_HEAD
    vm_program *program; /* never changes: no lock */
} Program;

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"text", NULL};
    const char *text;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:Program", names, &text)) return NULL;
    Program *self = (Program *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    return vm_py_made((PyObject *)self, vm_program_read(text, &self->program));
}

static void program_dealloc(Program *self) {
    vm_program_free(self->program);
    vm_py_free((PyObject *)self);
}

/* Reads the given variables' values, a tuple. -1 with an exception set. */
static int to_values(const vm_program *p, PyObject *given, int64_t value[VM_PROGRAM_NAMES]) {
    const Py_ssize_t count = (Py_ssize_t)vm_program_given(p);
    if (!PyTuple_Check(given) || PyTuple_Size(given) != count) {
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("sizes", "a tuple of %zd", "%R"), count, given);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) value[i] = PyLong_AsLongLong(PyTuple_GetItem(given, i));
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *program_trace(Program *self, PyObject *args) {
    vm_program_call call = {0};
    PyObject *given, *passing, *companions = NULL, *layers = NULL, *result = NULL;
    if (!PyArg_ParseTuple(args, "O&OiiiO|O:trace", vm_py_to_dtype, &call.dtype, &given, &call.gpu.sm,
                          &call.gpu.multiprocessors, &call.gpu.cudnn, &passing, &companions) ||
        to_values(self->program, given, call.value))
        return NULL;
    PyObject *texts = vm_py_to_passings(passing, &call.passing);
    if (texts && (!companions || (layers = vm_py_to_companions(companions, &call.companion)))) {
        vm_trace *trace;
        vm_status s;
        Py_BEGIN_ALLOW_THREADS
        s = vm_program_trace(self->program, &call, &trace);
        Py_END_ALLOW_THREADS
        PyObject *module = s ? NULL : PyType_GetModule(Py_TYPE((PyObject *)self));
        PyObject *type = module ? PyObject_GetAttrString(module, "Trace") : NULL;
        if (s)
            vm_py_raise(s);
        else if (type)
            result = vm_py_wrap_trace((PyTypeObject *)type, trace);
        else
            vm_trace_free(trace);
        Py_XDECREF(type);
    }
    PyMem_Free((void *)call.passing.item);
    PyMem_Free((void *)call.companion.item);
    Py_XDECREF(texts);
    Py_XDECREF(layers);
    return result;
}

static PyMethodDef methods[] = {
    {"trace", (PyCFunction)program_trace, METH_VARARGS,
     "trace($self, dtype, sizes, sm, multiprocessors, cudnn, passing, companions=(), /)\n--\n\nReturns the trace of a "
     "call on "
     "a GPU. cudnn: cuDNN's version if PyTorch tries its attention first, otherwise 0. passing: [(module, until, name, "
     "bytes, by, row_bytes=0, row_flops=0, lives=0)], sorted by module, of "
     "tensors that come for a module's call and leave after that of `until`. by: 0 if they are made there, 1 if "
     "accelerate's hooks send them, 2 if diffusers' do. companions: [(module, rank, rows, columns)], the low-rank "
     "pairs "
     "of layers. The others: csrc/predict/trace/trace.h."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, program_new},
                              {Py_tp_dealloc, program_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_doc, "A recorded module, from its text (csrc/predict/modules/program.h)."},
                              {0, NULL}};

PyType_Spec vm_py_program_type = {
    .name = "vaemem._core.Program", .basicsize = sizeof(Program), .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
