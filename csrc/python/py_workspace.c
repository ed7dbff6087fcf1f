/* vaemem._core.Cudnn: an installed cuDNN that answers for devices that need not exist. */
#include "../predict/workspace.h"
#include "py.h"

typedef struct {
    PyObject_HEAD
    vm_cudnn *cudnn;
} Cudnn;

static PyObject *cudnn_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", "no_driver", NULL};
    const char *path = NULL, *no_driver = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|zz:Cudnn", names, &path, &no_driver)) return NULL;
    Cudnn *self = (Cudnn *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    vm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = vm_cudnn_open(path, no_driver, VM_CUDNN_ASKABLE, &self->cudnn);
    Py_END_ALLOW_THREADS
    if (status == VM_OK) return (PyObject *)self;
    Py_DECREF(self);
    if (status == VM_ENOMEM) return PyErr_NoMemory();
    PyErr_SetString(PyExc_OSError, vm_error());
    return NULL;
}

static void cudnn_dealloc(Cudnn *self) {
    vm_cudnn_close(self->cudnn);
    vm_py_free((PyObject *)self);
}

static PyObject *cudnn_version(Cudnn *self, void *Py_UNUSED(closure)) {
    const size_t v = self->cudnn->version;
    return PyUnicode_FromFormat("%zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
}

static PyObject *cudnn_conv(Cudnn *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device", "question", "tf32", "every", NULL};
    const char *device;
    int tf32 = 1, every = 0;
    vm_conv conv;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO&|pp:conv", names, &device, vm_py_to_conv, &conv, &tf32, &every))
        return NULL;
    conv.tf32 = tf32;
    vm_conv_plan plan;
    vm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = vm_cudnn_conv(self->cudnn, device, &conv, every, &plan);
    Py_END_ALLOW_THREADS
    if (status) return vm_py_raise(status);
    if (!plan.found) Py_RETURN_NONE;
    return Py_BuildValue("{s:L, s:L, s:s, s:i, s:i, s:N}", "bytes", (long long)plan.bytes, "least",
                         (long long)plan.least, "engine", plan.name, "rank", plan.rank, "untried", plan.untried,
                         "fallback", PyBool_FromLong(plan.fallback));
}

static PyMethodDef methods[] = {
    {"conv", VM_PY_KEYWORDS(cudnn_conv), METH_VARARGS | METH_KEYWORDS,
     "conv(device, question, tf32=True, every=False)\n--\n\n"
     "The plan that PyTorch's eager convolution would run, as a dict with its workspace in bytes; None where cuDNN has "
     "none.\n"
     "device: cuDNN's device properties as JSON. question: as Trace.convs has them. untried: configurations before it\n"
     "that compile at run time. least: the fewest bytes that it or, with every, a later plan wants."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {{"version", (getter)cudnn_version, NULL, "cuDNN's version, '9.28.0'.", NULL},
                                   {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot type_slots[] = {{Py_tp_doc,
                                    "Cudnn(path=None, no_driver=None)\n--\n\n"
                                    "An installed cuDNN, 9.8 or later. Raises OSError where there is none. Ask it from "
                                    "a process of its own: it may crash."},
                                   {Py_tp_new, (void *)cudnn_new},
                                   {Py_tp_dealloc, (void *)cudnn_dealloc},
                                   {Py_tp_methods, methods},
                                   {Py_tp_getset, attributes},
                                   {0, NULL}};

PyType_Spec vm_py_cudnn_type = {"vaemem._core.Cudnn", sizeof(Cudnn), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                type_slots};
