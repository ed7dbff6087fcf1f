/* vaemem._core.Process: a simulated PyTorch process. vaemem/prediction/process.py wraps it. */
#include "../predict/judge.h"
#include "py.h"

typedef struct Process {
    PyObject_HEAD
    vm_process *process;
    PyObject *allocator; /* a CachingAllocator */
} Process;

static const char *const cublaslt_name[] = {"each", "kept", "shared"};

static PyObject *process_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"allocator", "cublas_bytes", "cublaslt_bytes", "cublaslt_use", NULL};
    PyObject *allocator;
    unsigned long long cublas, cublaslt;
    const char *use;
    int u = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKKs:Process", names, &allocator, &cublas, &cublaslt, &use))
        return NULL;
    while (u < 3 && strcmp(use, cublaslt_name[u])) u++;
    if (u == 3)
        return vm_py_refuse(PyExc_ValueError, VM_EXPECTED("cublaslt_use", "one of 'each', 'kept', 'shared'", "'%s'"),
                            use);
    vm_talloc *talloc = vm_py_allocator(allocator);
    Process *self = talloc ? (Process *)PyType_GenericAlloc(type, 0) : NULL;
    if (!self) return NULL;
    const vm_process_blas blas = {cublas, cublaslt, (vm_cublaslt)u};
    self->allocator = Py_NewRef(allocator);
    return vm_py_made((PyObject *)self, vm_process_new(talloc, &blas, &self->process));
}

static int process_traverse(Process *self, visitproc visit, void *arg) {
    Py_VISIT(self->allocator);
    Py_VISIT(Py_TYPE((PyObject *)self));
    return 0;
}

static int process_clear(Process *self) {
    vm_process_free(self->process);
    self->process = NULL;
    Py_CLEAR(self->allocator);
    return 0;
}

static void process_dealloc(Process *self) {
    PyObject_GC_UnTrack(self);
    process_clear(self);
    vm_py_free((PyObject *)self);
}

/* -1 with an exception set if the status is a failure. */
static int check(Process *self, vm_status s) {
    const vm_talloc_oom *full = s ? vm_process_last_oom(self->process) : NULL;
    if (full)
        vm_py_raise_full(self->allocator, full);
    else if (s)
        vm_py_raise(s);
    return s ? -1 : 0;
}

/* ---- numbers ---- */

/* A sequence of integers as a new array; NULL with an exception set. */
static uint64_t *to_numbers(const char *name, PyObject *sequence, size_t *count) {
    PyObject *list = PySequence_Tuple(sequence); /* a copy: an item's __index__ may change the sequence */
    if (!list) return NULL;
    *count = (size_t)PyTuple_Size(list);
    uint64_t *number = PyMem_Calloc(*count + 1, sizeof *number);
    if (!number) PyErr_NoMemory();
    for (size_t i = 0; number && i < *count; i++) {
        PyObject *index = PyNumber_Index(PyTuple_GetItem(list, (Py_ssize_t)i));
        if (index) number[i] = PyLong_AsUnsignedLongLong(index);
        if (index && PyErr_Occurred())
            vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "integers from 0 to 2^64 - 1", "%R"), name, index);
        Py_XDECREF(index);
        if (!PyErr_Occurred()) continue;
        PyMem_Free(number);
        number = NULL;
    }
    Py_DECREF(list);
    return number;
}

static PyObject *number_item(const void *numbers, size_t i) {
    return PyLong_FromUnsignedLongLong(((const uint64_t *)numbers)[i]);
}

/* ---- allocating and freeing ---- */

static PyObject *process_hold(Process *self, PyObject *args) {
    const char *name, *stamp = NULL;
    PyObject *sizes;
    size_t count;
    if (!PyArg_ParseTuple(args, "sO|z:hold", &name, &sizes, &stamp)) return NULL;
    uint64_t *bytes = to_numbers("bytes", sizes, &count), *address = NULL;
    PyObject *list = NULL;
    if (bytes && !(address = PyMem_Calloc(count + 1, sizeof *address))) PyErr_NoMemory();
    if (address && !check(self, vm_process_hold(self->process, stamp ? stamp : name, name, bytes, count, address)))
        list = vm_py_list(count, number_item, address);
    PyMem_Free(bytes);
    PyMem_Free(address);
    return list;
}

static PyObject *process_copy(Process *self, PyObject *args) {
    const char *stamp;
    PyObject *list, *sizes;
    size_t count, wanted, copied = 0;
    if (!PyArg_ParseTuple(args, "sO!O:copy", &stamp, &PyList_Type, &list, &sizes)) return NULL;
    uint64_t *address = to_numbers("addresses", list, &count);
    uint64_t *bytes = address ? to_numbers("bytes", sizes, &wanted) : NULL;
    int failed = -1;
    if (bytes && wanted != count)
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("bytes", "%zu of them", "%zu"), count, wanted);
    else if (bytes)
        failed = check(self, vm_process_copy(self->process, stamp, address, bytes, count, &copied));
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (failed) PyErr_Fetch(&type, &value, &traceback); /* report the copies made in any case */
    for (size_t i = 0; i < copied; i++) {
        PyObject *now = PyLong_FromUnsignedLongLong(address[i]);
        if (!now || PyList_SetItem(list, (Py_ssize_t)i, now)) break;
    }
    if (failed && !PyErr_Occurred()) {
        PyErr_Restore(type, value, traceback);
    } else {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    }
    PyMem_Free(address);
    PyMem_Free(bytes);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *process_release(Process *self, PyObject *addresses) {
    size_t count;
    uint64_t *address = to_numbers("addresses", addresses, &count);
    if (!address) return NULL;
    vm_status s = VM_OK;
    for (size_t i = 0; !s && i < count; i++) s = vm_process_release(self->process, address[i]);
    PyMem_Free(address);
    return check(self, s) ? NULL : Py_NewRef(Py_None);
}

/* Returns: {id: address} of the storages that a call left. */
static PyObject *left(const uint64_t *address, size_t ids) {
    PyObject *dict = PyDict_New();
    for (size_t id = 0; dict && id < ids; id++) {
        if (!address[id]) continue;
        PyObject *key = PyLong_FromSize_t(id), *value = PyLong_FromUnsignedLongLong(address[id]);
        if (!key || !value || PyDict_SetItem(dict, key, value)) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *play(Process *self, const vm_trace *t, const uint64_t *workspace, const uint64_t *next) {
    npy_intp steps[1] = {(npy_intp)t->steps};
    PyObject *allocated = PyArray_SimpleNew(1, steps, NPY_UINT64), *reserved = PyArray_SimpleNew(1, steps, NPY_UINT64);
    uint64_t *address = PyMem_Calloc((size_t)t->ids + 1, sizeof *address);
    PyObject *result = NULL;
    if (!address) PyErr_NoMemory();
    if (allocated && reserved && address &&
        !check(self,
               vm_process_call(self->process, t, workspace, next, address, PyArray_DATA((PyArrayObject *)allocated),
                               PyArray_DATA((PyArrayObject *)reserved)))) {
        PyObject *ids = left(address, t->ids);
        if (ids) result = PyTuple_Pack(3, ids, allocated, reserved);
        Py_XDECREF(ids);
    }
    PyMem_Free(address);
    Py_XDECREF(allocated);
    Py_XDECREF(reserved);
    return result;
}

static PyObject *process_call(Process *self, PyObject *args) {
    PyObject *trace, *workspaces, *following, *result = NULL;
    size_t count, others;
    if (!PyArg_ParseTuple(args, "OOO:call", &trace, &workspaces, &following)) return NULL;
    const vm_trace *t = vm_py_trace(trace);
    uint64_t *workspace = t ? to_numbers("workspaces", workspaces, &count) : NULL;
    uint64_t *next = workspace ? to_numbers("next", following, &others) : NULL;
    if (next && (count != t->convs || others != t->convs))
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("workspaces, next", "%zu of each", "%zu and %zu"), t->convs, count,
                     others);
    else if (next)
        result = play(self, t, workspace, next);
    PyMem_Free(workspace);
    PyMem_Free(next);
    return result;
}

/* Converts a sequence of sequences of `count` integers to rows; NULL with an exception set. */
static uint64_t *to_rows(const char *name, PyObject *rows, size_t count) {
    const size_t many = (size_t)PyTuple_Size(rows);
    uint64_t *number = PyMem_Calloc(many * count + 1, sizeof *number);
    if (!number) PyErr_NoMemory();
    for (size_t i = 0; number && i < many; i++) {
        size_t got = 0;
        uint64_t *row = to_numbers(name, PyTuple_GetItem(rows, (Py_ssize_t)i), &got);
        if (row && got == count) memcpy(number + i * count, row, count * sizeof *row);
        if (row && got != count)
            vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "%zu of them", "%zu"), name, count, got);
        PyMem_Free(row);
        if (!PyErr_Occurred()) continue;
        PyMem_Free(number);
        number = NULL;
    }
    return number;
}

typedef struct table {
    const uint64_t *number;
    size_t columns;
} table;

static PyObject *row_item(const void *context, size_t i) {
    const table *t = context;
    return vm_py_list(t->columns, number_item, t->number + i * t->columns);
}

static PyObject *process_again(Process *self, PyObject *args) {
    PyObject *rows = NULL, *pairs = NULL, *list = NULL;
    uint64_t *workspace = NULL, *span = NULL, *most = NULL;
    int above = 1;
    if (!PyArg_ParseTuple(args, "O!O!|p:again", &PyTuple_Type, &rows, &PyTuple_Type, &pairs, &above)) return NULL;
    const size_t count = (size_t)PyTuple_Size(rows), spans = (size_t)PyTuple_Size(pairs);
    const size_t convs = vm_process_script(self->process)->convs;
    if ((span = to_rows("spans", pairs, 2))) workspace = to_rows("workspaces", rows, convs);
    if (workspace && vm_process_script(self->process)->convs != convs) {
        vm_py_refuse(PyExc_ValueError,
                     VM_EXPECTED("workspaces", "a process that does nothing while they are read", ""));
        PyMem_Free(workspace);
        workspace = NULL;
    }
    vm_process_span *steps = workspace ? PyMem_Calloc(spans + 1, sizeof *steps) : NULL;
    if (steps && !(most = PyMem_Calloc(count * spans + 1, sizeof *most))) PyErr_NoMemory();
    for (size_t i = 0; most && i < spans; i++) steps[i] = (vm_process_span){span[2 * i], span[2 * i + 1]};
    if (most && !vm_py_check(vm_process_again(self->process, steps, spans, above, workspace, count, most)))
        list = vm_py_list(count, row_item, &(table){most, spans});
    PyMem_Free(most);
    PyMem_Free(steps);
    PyMem_Free(workspace);
    PyMem_Free(span);
    return list;
}

static PyObject *process_takes(Process *self, PyObject *args) {
    PyObject *pairs, *rows;
    Py_ssize_t first, likely;
    int above;
    vm_takes takes = {0};
    uint64_t *workspace = NULL, *phase;
    if (!PyArg_ParseTuple(args, "O!npO!n:takes", &PyTuple_Type, &pairs, &first, &above, &PyTuple_Type, &rows, &likely))
        return NULL;
    const size_t count = (size_t)PyTuple_Size(rows), phases = (size_t)PyTuple_Size(pairs);
    const size_t convs = vm_process_script(self->process)->convs;
    if ((phase = to_rows("phases", pairs, 2))) workspace = to_rows("workspaces", rows, convs);
    if (workspace && vm_process_script(self->process)->convs != convs)
        vm_py_refuse(PyExc_ValueError,
                     VM_EXPECTED("workspaces", "a process that does nothing while they are read", ""));
    else if (workspace && (first < 0 || likely < 0))
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("first, likely", "0 or more", ""));
    else if (workspace)
        vm_py_check(vm_judge_rows(self->process, (const vm_judge_phase *)phase, (size_t)first, phases, above, workspace,
                                  count, (size_t)likely, &takes));
    PyMem_Free(workspace);
    PyMem_Free(phase);
    if (PyErr_Occurred()) return NULL;
    return Py_BuildValue("(KKKK)", (unsigned long long)takes.own, (unsigned long long)takes.least,
                         (unsigned long long)takes.most, (unsigned long long)takes.bound);
}

static PyObject *process_empty_cache(Process *self, PyObject *Py_UNUSED(ignored)) {
    return check(self, vm_process_empty_cache(self->process)) ? NULL : Py_NewRef(Py_None);
}

static PyObject *process_reset_peak(Process *self, PyObject *Py_UNUSED(ignored)) {
    return check(self, vm_process_reset_peak(self->process)) ? NULL : Py_NewRef(Py_None);
}

/* ---- phases ---- */

static PyObject *process_count(Process *self, PyObject *args) {
    unsigned long long count[5], outside;
    if (!PyArg_ParseTuple(args, "KKKKKK:count", &count[0], &count[1], &count[2], &count[3], &count[4], &outside))
        return NULL;
    const vm_work work = {count[0], count[1], count[2], count[3], count[4]};
    vm_process_count(self->process, &work, outside);
    Py_RETURN_NONE;
}

static PyObject *process_times(Process *self, PyObject *number) {
    const unsigned long long times = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    vm_process_times(self->process, times);
    Py_RETURN_NONE;
}

static PyObject *process_read(Process *self, PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s:read", &name)) return NULL;
    return check(self, vm_process_read(self->process, name)) ? NULL : Py_NewRef(Py_None);
}

typedef struct reading_list {
    const vm_names *names;
    const vm_reading *reading;
} reading_list;

static PyObject *reading_item(const void *context, size_t i) {
    const reading_list *t = context;
    const vm_reading *r = &t->reading[i];
    return Py_BuildValue(
        "(nn)KKKKNKKKKKK", (Py_ssize_t)r->span.since, (Py_ssize_t)r->span.until, (unsigned long long)r->base_allocated,
        (unsigned long long)r->base_reserved, (unsigned long long)r->peak_allocated,
        (unsigned long long)r->peak_reserved, PyUnicode_FromString(vm_names_get(t->names, r->name)),
        (unsigned long long)r->work.flops, (unsigned long long)r->work.attended, (unsigned long long)r->work.moved,
        (unsigned long long)r->work.sent, (unsigned long long)r->work.host_flops, (unsigned long long)r->outside);
}

static PyObject *process_readings(Process *self, void *Py_UNUSED(closure)) {
    reading_list t = {.names = &vm_process_script(self->process)->names};
    size_t count;
    t.reading = vm_process_readings(self->process, &count);
    return vm_py_list(count, reading_item, &t);
}

/* ---- on another device ---- */

static PyObject *process_replay(Process *self, PyObject *args) {
    PyObject *from;
    int first_only;
    if (!PyArg_ParseTuple(args, "O!p:replay", Py_TYPE((PyObject *)self), &from, &first_only)) return NULL;
    return check(self, vm_process_replay(self->process, ((Process *)from)->process, first_only)) ? NULL
                                                                                                 : Py_NewRef(Py_None);
}

static PyObject *process_least(Process *self, PyObject *args) {
    unsigned long long low, high;
    int first_only;
    uint64_t least;
    if (!PyArg_ParseTuple(args, "pKK:least", &first_only, &low, &high)) return NULL;
    const vm_status s = vm_process_least(self->process, first_only, low, high, &least);
    return s ? vm_py_raise(s) : PyLong_FromUnsignedLongLong(least);
}

static PyObject *process_most_reserved(Process *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(vm_process_most_reserved(self->process));
}

/* ---- what happened ---- */

const vm_trace *vm_py_script(PyObject *object) {
    const bool is = vm_py_is(object, (destructor)process_dealloc);
    return is ? vm_process_script(((Process *)object)->process) : NULL;
}

typedef struct named {
    const vm_names *names;
    const vm_process_list *list;
} named;

static PyObject *named_item(const void *context, size_t i) {
    const named *n = context;
    const vm_process_named *one = &n->list->item[i];
    if (!one->bytes) return NULL;
    return Py_BuildValue("(NKK)", PyUnicode_FromString(vm_names_get(n->names, one->name)),
                         (unsigned long long)one->bytes, (unsigned long long)one->rounded);
}

static PyObject *process_peak(Process *self, PyObject *args) {
    const vm_names *names = &vm_process_script(self->process)->names;
    const vm_trace_step *step;
    vm_process_list list;
    Py_ssize_t reading = -1;
    if (!PyArg_ParseTuple(args, "|n:peak", &reading)) return NULL;
    if (check(self, vm_process_peak(self->process, (size_t)reading, &list, &step))) return NULL;
    PyObject *name = step ? PyUnicode_FromString(vm_names_get(names, step->name)) : Py_NewRef(Py_None);
    PyObject *tensors = vm_py_list(list.count, named_item, &(named){names, &list});
    vm_scratch_free(list.item);
    return Py_BuildValue("NN", name, tensors);
}

static PyObject *process_baseline(Process *self, PyObject *Py_UNUSED(ignored)) {
    vm_process_list list;
    if (check(self, vm_process_baseline(self->process, &list))) return NULL;
    PyObject *tensors = vm_py_list(list.count, named_item, &(named){&vm_process_script(self->process)->names, &list});
    vm_scratch_free(list.item);
    return tensors;
}

static PyObject *process_bytes_at(Process *self, PyObject *number) {
    const unsigned long long address = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(vm_process_bytes_at(self->process, address));
}

static PyObject *frame_item(const void *names, size_t i) { return PyUnicode_FromString(vm_names_get(names, i)); }

static PyObject *process_frames(Process *self, void *Py_UNUSED(closure)) {
    const vm_names *names = &vm_process_script(self->process)->names;
    return vm_py_list(names->count, frame_item, names);
}

static PyObject *process_convs(Process *self, void *Py_UNUSED(closure)) {
    return vm_py_convs(vm_process_script(self->process));
}

static PyObject *process_steps(Process *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(vm_process_script(self->process)->steps);
}

static PyObject *process_refused(Process *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(vm_process_refused(self->process));
}

/* ---- the type ---- */

static PyMethodDef methods[] = {
    {"hold", (PyCFunction)process_hold, METH_VARARGS,
     "hold($self, name, sizes, stamp=None, /)\n--\n\nAllocates storages of these sizes under one name, all or "
     "none. stamp: another name in the allocator's history. Returns the addresses (0 for 0 bytes)."},
    {"copy", (PyCFunction)process_copy, METH_VARARGS,
     "copy($self, stamp, addresses, sizes, /)\n--\n\nReplaces each storage by a new one of that size; a size of 0 "
     "leaves it unchanged. Updates the list of addresses, also if an allocation fails."},
    {"release", (PyCFunction)process_release, METH_O, "release($self, addresses, /)\n--\n\nFrees storages."},
    {"call", (PyCFunction)process_call, METH_VARARGS,
     "call($self, trace, workspaces, next, /)\n--\n\nPlays a trace. Its convolutions take these workspaces, or "
     "those of next if they cannot be allocated. Returns ({id: address} of the storages left, bytes allocated and "
     "reserved at the height of each step)."},
    {"again", (PyCFunction)process_again, METH_VARARGS,
     "again($self, rows, spans, above=True, /)\n--\n\nReturns the most bytes that the same steps would have "
     "reserved in each span (since, until) of steps, on fresh allocators like the process's: a list for each row "
     "of workspaces of its convolutions. above: only bytes beyond those reserved before the span."},
    {"takes", (PyCFunction)process_takes, METH_VARARGS,
     "takes($self, phases, first, above, rows, likely, /)\n--\n\nReturns (as played, least, most, bound): bytes "
     "of the phases, which are the readings from `first` on, over rows of other plausible workspaces. phases: "
     "(bytes outside PyTorch, bytes that are exact). above: only bytes beyond the baselines. The first `likely` "
     "rows count for the least and the most, all for the bound."},
    {"empty_cache", (PyCFunction)process_empty_cache, METH_NOARGS,
     "empty_cache($self, /)\n--\n\nSimulates torch.cuda.empty_cache."},
    {"reset_peak", (PyCFunction)process_reset_peak, METH_NOARGS,
     "reset_peak($self, /)\n--\n\nSimulates torch.cuda.reset_peak_memory_stats; live storages become the baseline."},
    {"count", (PyCFunction)process_count, METH_VARARGS,
     "count($self, flops, attended, moved, sent, host_flops, outside, /)\n--\n\nAdds work to the phase. outside: "
     "bytes of the device outside PyTorch until the phase ends."},
    {"times", (PyCFunction)process_times, METH_O, "times($self, times, /)\n--\n\nMultiplies work counted from now on."},
    {"read", (PyCFunction)process_read, METH_VARARGS,
     "read($self, name, /)\n--\n\nEnds the phase: stores a reading of the counters under a name."},
    {"replay", (PyCFunction)process_replay, METH_VARARGS,
     "replay($self, process, first_only, /)\n--\n\nRepeats on this new process everything that another one did. "
     "first_only: cuDNN's next plans need as much as the first ones."},
    {"least", (PyCFunction)process_least, METH_VARARGS,
     "least($self, first_only, low, high, /)\n--\n\nReturns the bytes of the smallest device on which a replay "
     "succeeds, in pages of 2 MiB. low: too few bytes; high: enough, as far as known."},
    {"peak", (PyCFunction)process_peak, METH_VARARGS,
     "peak($self, reading=-1, /)\n--\n\nReturns (name of the call's step that makes the peak or None, [(name, "
     "bytes, bytes added by rounding outside of calls)] of the storages live then): of a reading, or since the "
     "last reset."},
    {"baseline", (PyCFunction)process_baseline, METH_NOARGS,
     "baseline($self, /)\n--\n\nReturns the storages live when the peak was reset, in peak's format."},
    {"bytes_at", (PyCFunction)process_bytes_at, METH_O,
     "bytes_at($self, address, /)\n--\n\nReturns the bytes of the storage at an address, or 0."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"frames", (getter)process_frames, NULL, "Names by tag, for the allocator's history and errors.", NULL},
    {"convs", (getter)process_convs, NULL, "Its calls' convolutions, each once, in the format of Trace.convs.", NULL},
    {"steps", (getter)process_steps, NULL, "How many steps were played so far.", NULL},
    {"readings", (getter)process_readings, NULL,
     "[((since, until), allocated and reserved at the reset, the same at the peak, name, flops, attended, moved, "
     "sent, host_flops, outside)]: steps, then bytes.",
     NULL},
    {"most_reserved", (getter)process_most_reserved, NULL, "The most bytes reserved so far.", NULL},
    {"refused", (getter)process_refused, NULL, "How many convolutions were refused their workspace so far.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, process_new},
    {Py_tp_dealloc, process_dealloc},
    {Py_tp_traverse, process_traverse},
    {Py_tp_clear, process_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {Py_tp_doc, "A simulated PyTorch process: its storages by name, and the live ones at its peak."},
    {0, NULL}};

PyType_Spec vm_py_process_type = {.name = "vaemem._core.Process",
                                  .basicsize = sizeof(Process),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                  .slots = slots};
