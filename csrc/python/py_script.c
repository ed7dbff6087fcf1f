/* vaemem._core.Script: what a program does with a device's memory. vaemem/prediction/process.py writes it.
 *
 * Python code knows a storage by a handle: its number in the script + 1, or 0 for a storage of 0 bytes. */
#include "../predict/script.h"
#include "py.h"

typedef struct Script {
    PyObject_HEAD
    vm_script *script;
} Script;

static PyObject *script_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Script", names)) return NULL;
    Script *self = (Script *)PyType_GenericAlloc(type, 0);
    return self ? vm_py_made((PyObject *)self, vm_script_new(&self->script)) : NULL;
}

static void script_dealloc(Script *self) {
    vm_script_free(self->script);
    vm_py_free((PyObject *)self);
}

vm_script *vm_py_script(PyObject *object) {
    return vm_py_is(object, (destructor)script_dealloc) ? ((Script *)object)->script : NULL;
}

/* ---- handles ---- */

static uint64_t handle_of(const vm_script *s, uint32_t id) { return s->storage[id].bytes ? (uint64_t)id + 1 : 0; }

/* Handles as numbers of storages, without those of 0 bytes; NULL with an exception set. A handle that is no number
 * becomes one that no script has. */
static uint32_t *to_ids(PyObject *handles, size_t *count) {
    uint64_t *handle = vm_py_to_numbers("storages", handles, count);
    uint32_t *id = handle ? PyMem_Calloc(*count + 1, sizeof *id) : NULL;
    size_t kept = 0;
    if (handle && !id) PyErr_NoMemory();
    for (size_t i = 0; id && i < *count; i++)
        if (handle[i]) id[kept++] = (uint32_t)VM_MIN(handle[i] - 1, UINT32_MAX);
    *count = kept;
    PyMem_Free(handle);
    return id;
}

typedef struct handles {
    const vm_script *script;
    uint32_t first;
} handles;

static PyObject *handle_item(const void *context, size_t i) {
    const handles *h = context;
    return PyLong_FromUnsignedLongLong(handle_of(h->script, h->first + (uint32_t)i));
}

/* ---- storages ---- */

static PyObject *script_take(Script *self, PyObject *args) {
    const char *name, *stamp = NULL;
    PyObject *sizes;
    size_t count;
    uint32_t first;
    if (!PyArg_ParseTuple(args, "sO|z:take", &name, &sizes, &stamp)) return NULL;
    uint64_t *bytes = vm_py_to_numbers("bytes", sizes, &count);
    if (!bytes) return NULL;
    const vm_status s = vm_script_take(self->script, stamp ? stamp : name, name, bytes, count, &first);
    PyMem_Free(bytes);
    return s ? vm_py_raise(s) : vm_py_list(count, handle_item, &(handles){self->script, first});
}

static PyObject *script_replace(Script *self, PyObject *args) {
    const char *stamp;
    PyObject *list, *sizes;
    size_t count, wanted;
    if (!PyArg_ParseTuple(args, "sOO:replace", &stamp, &list, &sizes)) return NULL;
    uint64_t *handle = vm_py_to_numbers("storages", list, &count);
    uint64_t *bytes = handle ? vm_py_to_numbers("bytes", sizes, &wanted) : NULL;
    uint32_t *id = bytes ? PyMem_Calloc(count + 1, sizeof *id) : NULL;
    int failed = -1;
    for (size_t i = 0; id && i < count; i++) id[i] = (uint32_t)VM_MIN(handle[i] - 1, UINT32_MAX);
    if (bytes && !id)
        PyErr_NoMemory();
    else if (bytes && wanted != count)
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("bytes", "%zu of them", "%zu"), count, wanted);
    else if (bytes)
        failed = vm_py_check(vm_script_replace(self->script, stamp, id, bytes, count));
    for (size_t i = 0; !failed && i < count; i++) handle[i] = handle_of(self->script, id[i]);
    PyObject *result = failed ? NULL : vm_py_list(count, vm_py_number_item, handle);
    PyMem_Free(handle);
    PyMem_Free(bytes);
    PyMem_Free(id);
    return result;
}

static PyObject *script_give(Script *self, PyObject *storages) {
    size_t count;
    uint32_t *id = to_ids(storages, &count);
    if (!id) return NULL;
    const vm_status s = vm_script_give(self->script, id, count);
    PyMem_Free(id);
    return vm_py_none_or_raise(s);
}

static PyObject *script_bytes_of(Script *self, PyObject *number) {
    const unsigned long long handle = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    const vm_script *const s = self->script;
    const bool is_there = handle && handle <= s->storages && s->storage[handle - 1].is_there;
    return PyLong_FromUnsignedLongLong(is_there ? s->storage[handle - 1].bytes : 0);
}

/* ---- calls ---- */

PyObject *vm_py_left(const vm_script *s, const vm_event *e) {
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < e->count; i++) {
        PyObject *key = PyLong_FromUnsignedLong(s->call[e->of].left[i]),
                 *value = PyLong_FromUnsignedLongLong(handle_of(s, e->first + (uint32_t)i));
        if (!key || !value || PyDict_SetItem(dict, key, value)) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *script_call(Script *self, PyObject *trace) {
    vm_trace *const t = vm_py_trace(trace);
    const vm_event *e;
    if (!t || vm_py_check(vm_script_call(self->script, t, &e))) return NULL;
    return vm_py_left(self->script, &(vm_event){.of = e->of, .first = e->first, .count = e->count});
}

static PyObject *script_empty_cache(Script *self, PyObject *Py_UNUSED(ignored)) {
    return vm_py_none_or_raise(vm_script_empty_cache(self->script));
}

/* ---- phases ---- */

static PyObject *script_reset_peak(Script *self, PyObject *Py_UNUSED(ignored)) {
    return vm_py_none_or_raise(vm_script_reset_peak(self->script));
}

static PyObject *script_count(Script *self, PyObject *args) {
    unsigned long long count[5], outside;
    if (!PyArg_ParseTuple(args, "KKKKKK:count", &count[0], &count[1], &count[2], &count[3], &count[4], &outside))
        return NULL;
    vm_script_count(self->script, &(vm_work){count[0], count[1], count[2], count[3], count[4]}, outside);
    Py_RETURN_NONE;
}

static PyObject *script_times(Script *self, PyObject *number) {
    const unsigned long long times = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    vm_script_times(self->script, times);
    Py_RETURN_NONE;
}

static PyObject *script_read(Script *self, PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s:read", &name)) return NULL;
    return vm_py_none_or_raise(vm_script_read(self->script, name));
}

static PyObject *phase_item(const void *context, size_t i) {
    const vm_script *const s = context;
    const vm_phase *const p = &s->phase[i];
    return Py_BuildValue("(NKKKKKK)", PyUnicode_FromString(vm_names_get(&s->names, p->name)),
                         (unsigned long long)p->work.flops, (unsigned long long)p->work.attended,
                         (unsigned long long)p->work.moved, (unsigned long long)p->work.sent,
                         (unsigned long long)p->work.host_flops, (unsigned long long)p->outside);
}

static PyObject *script_phases(Script *self, void *Py_UNUSED(closure)) {
    return vm_py_list(self->script->phases, phase_item, self->script);
}

/* ---- contents ---- */

static PyObject *name_item(const void *names, size_t i) { return PyUnicode_FromString(vm_names_get(names, i)); }

static PyObject *script_names(Script *self, void *Py_UNUSED(closure)) {
    return vm_py_list(self->script->names.count, name_item, &self->script->names);
}

static PyObject *script_convs(Script *self, void *Py_UNUSED(closure)) {
    return vm_py_convs(self->script->conv, self->script->convs);
}

static PyObject *script_events(Script *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(self->script->events);
}

/* ---- the type ---- */

static PyMethodDef methods[] = {
    {"take", (PyCFunction)script_take, METH_VARARGS,
     "take($self, name, sizes, stamp=None, /)\n--\n\nTakes storages of these sizes under one name. stamp: another name "
     "in the allocator's history. Returns their handles (0 for 0 bytes)."},
    {"replace", (PyCFunction)script_replace, METH_VARARGS,
     "replace($self, stamp, storages, sizes, /)\n--\n\nReplaces each storage by a new one of that size, one after the "
     "other; a size of 0 leaves it unchanged. Returns the handles."},
    {"give", (PyCFunction)script_give, METH_O, "give($self, storages, /)\n--\n\nFrees storages, all or none."},
    {"call", (PyCFunction)script_call, METH_O,
     "call($self, trace, /)\n--\n\nCalls a trace. Returns {id: handle} of the storages that it leaves."},
    {"empty_cache", (PyCFunction)script_empty_cache, METH_NOARGS,
     "empty_cache($self, /)\n--\n\nCalls torch.cuda.empty_cache."},
    {"reset_peak", (PyCFunction)script_reset_peak, METH_NOARGS,
     "reset_peak($self, /)\n--\n\nCalls torch.cuda.reset_peak_memory_stats; live storages become the baseline."},
    {"count", (PyCFunction)script_count, METH_VARARGS,
     "count($self, flops, attended, moved, sent, host_flops, outside, /)\n--\n\nAdds work to the phase. outside: "
     "bytes of the device outside PyTorch until the phase ends."},
    {"times", (PyCFunction)script_times, METH_O, "times($self, times, /)\n--\n\nMultiplies work counted from now on."},
    {"read", (PyCFunction)script_read, METH_VARARGS, "read($self, name, /)\n--\n\nEnds the phase under a name."},
    {"bytes_of", (PyCFunction)script_bytes_of, METH_O,
     "bytes_of($self, storage, /)\n--\n\nReturns the bytes of a storage, or 0 if it is not there."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"names", (getter)script_names, NULL, "Names by number: the tags of the allocator's history and errors.", NULL},
    {"convs", (getter)script_convs, NULL, "Its calls' convolutions, each once, in the format of Trace.convs.", NULL},
    {"events", (getter)script_events, NULL, "How many events it has.", NULL},
    {"phases", (getter)script_phases, NULL,
     "[(name, flops, attended, moved, sent, host_flops, outside)] of the phases that ended.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, script_new},
                              {Py_tp_dealloc, script_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, attributes},
                              {Py_tp_doc, "What a program does with a device's memory, in order."},
                              {0, NULL}};

PyType_Spec vm_py_script_type = {
    .name = "vaemem._core.Script", .basicsize = sizeof(Script), .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
