/* vaemem._core.CachingAllocator: the simulated PyTorch allocator. vaemem/prediction/caching_allocator.py wraps it. */
#include "py.h"

#include "../predict/allocator/allocator.h"

typedef struct Allocator {
    PyObject_HEAD
    vm_talloc *talloc;
} Allocator;

void vm_py_raise_full(PyObject *allocator, const struct vm_talloc_oom *oom) {
    const struct {
        const char *name;
        uint64_t value;
    } figures[] = {{"requested", oom->requested}, {"wanted", oom->wanted},   {"total", oom->total},
                   {"free", oom->free},           {"allowed", oom->allowed}, {"allocated", oom->allocated},
                   {"reserved", oom->reserved},   {"tag", oom->tag}};
    PyObject *type = PyObject_GetAttrString(allocator, "OutOfMemoryError");
    PyObject *error = type ? PyObject_CallFunction(type, "s", vm_error()) : NULL;
    for (size_t i = 0; error && i < sizeof figures / sizeof *figures; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(figures[i].value);
        if (!value || PyObject_SetAttrString(error, figures[i].name, value)) Py_CLEAR(error);
        Py_XDECREF(value);
    }
    if (error) PyErr_SetObject(type, error);
    Py_XDECREF(error);
    Py_XDECREF(type);
}

/* Raises OutOfMemoryError with the figures if the simulated device is full; otherwise as vm_py_raise. Returns: NULL. */
static PyObject *raise_status(Allocator *self, vm_status status) {
    const vm_talloc_oom *full = status == VM_ENOMEM ? vm_talloc_last_oom(self->talloc) : NULL;
    if (!full) return vm_py_raise(status);
    vm_py_raise_full((PyObject *)self, full);
    return NULL;
}

static int to_uint64(PyObject *object, const char *name, uint64_t *out) {
    PyObject *index = PyBool_Check(object) ? NULL : PyNumber_Index(object);
    if (!index) {
        vm_py_refuse_type(name, "an integer", object);
        return -1;
    }
    *out = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (!PyErr_Occurred()) return 0;
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("%s", "an integer from 0 to 2^64 - 1", "%R"), name, object);
    return -1;
}

/* ---- creation and deletion ---- */

static int parse_divisions(PyObject *object, vm_talloc_config *config) {
    PyObject *list = PySequence_Tuple(object); /* a copy: an item's __index__ may change the sequence */
    if (!list) return -1;
    int bad = PyTuple_Size(list) != VM_TALLOC_INTERVALS;
    if (bad)
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("roundup_power2_divisions", "%d numbers", "%zd"),
                     VM_TALLOC_INTERVALS, PyTuple_Size(list));
    for (Py_ssize_t i = 0; !bad && i < VM_TALLOC_INTERVALS; i++) {
        uint64_t n;
        bad = to_uint64(PyTuple_GetItem(list, i), "roundup_power2_divisions", &n);
        if (!bad && n > (1u << 31)) {
            vm_py_refuse(PyExc_ValueError, VM_EXPECTED("roundup_power2_divisions", "at most 2^31", "%llu"),
                         (unsigned long long)n);
            bad = 1;
        }
        if (!bad) config->roundup_divisions[i] = (uint32_t)n;
    }
    Py_DECREF(list);
    return bad ? -1 : 0;
}

static PyObject *allocator_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"total_memory",
                            "allowed_memory",
                            "max_split_size",
                            "max_non_split_rounding",
                            "reservation",
                            "divisions",
                            "gc_threshold",
                            "expandable_segments",
                            "driver_pool",
                            "history",
                            NULL};
    PyObject *divisions;
    int expandable, driver_pool, history;
    vm_talloc_config config = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKKOdppp", names, &config.total_memory, &config.allowed_memory,
                                     &config.max_split_size, &config.max_non_split_rounding, &config.reservation,
                                     &divisions, &config.gc_threshold, &expandable, &driver_pool, &history) ||
        parse_divisions(divisions, &config))
        return NULL;
    config.expandable_segments = expandable;
    config.driver_pool = driver_pool;
    config.history = history;
    Allocator *self = (Allocator *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    return vm_py_made((PyObject *)self, vm_talloc_new(&config, &self->talloc));
}

static void allocator_dealloc(Allocator *self) {
    vm_talloc_delete(self->talloc);
    vm_py_free((PyObject *)self);
}

vm_talloc *vm_py_allocator(PyObject *object) {
    if (vm_py_is(object, (destructor)allocator_dealloc)) return ((Allocator *)object)->talloc;
    return (void *)vm_py_refuse_type("allocator", "a CachingAllocator", object);
}

/* ---- malloc and free ---- */

static PyObject *allocator_malloc(Allocator *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"bytes", "stream", NULL};
    PyObject *size, *on = NULL;
    uint64_t bytes, stream = 0, address = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", names, &size, &on)) return NULL;
    if (to_uint64(size, "bytes", &bytes) || (on && to_uint64(on, "stream", &stream))) return NULL;
    vm_status s = vm_talloc_malloc(self->talloc, bytes, stream, &address);
    return s ? raise_status(self, s) : PyLong_FromUnsignedLongLong(address);
}

static PyObject *allocator_free(Allocator *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"address", "pending", NULL};
    PyObject *where;
    int pending = 0;
    uint64_t address;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p", names, &where, &pending)) return NULL;
    if (to_uint64(where, "address", &address)) return NULL;
    return vm_py_none_or_raise((pending ? vm_talloc_free_request : vm_talloc_free)(self->talloc, address));
}

static PyObject *allocator_empty_cache(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    return vm_py_none_or_raise(vm_talloc_empty_cache(self->talloc));
}

static PyObject *allocator_round(Allocator *self, PyObject *size) {
    uint64_t bytes;
    if (to_uint64(size, "bytes", &bytes)) return NULL;
    if (bytes > VM_TALLOC_LARGEST)
        return vm_py_refuse(PyExc_OverflowError, VM_EXPECTED("bytes", "at most 2^60", "%R"), size);
    return PyLong_FromUnsignedLongLong(vm_talloc_round(vm_talloc_settings(self->talloc), bytes));
}

/* Runs some steps at a time; signals are handled and other threads may run in between. */
static PyObject *allocator_run(Allocator *self, PyObject *args) {
    enum { AT_ONCE = 1 << 14 };
    Py_buffer steps, addresses;
    if (!PyArg_ParseTuple(args, "y*w*", &steps, &addresses)) return NULL;
    const vm_talloc_step *step = steps.buf;
    const size_t count = (size_t)steps.len / sizeof *step, ids = (size_t)addresses.len / 8;
    size_t done = 0, taken = 0;
    vm_status s = VM_OK;
    if (steps.len % (Py_ssize_t)sizeof *step || addresses.len % 8 || (uintptr_t)steps.buf % 8 ||
        (uintptr_t)addresses.buf % 8)
        vm_py_refuse(
            PyExc_ValueError,
            VM_EXPECTED("steps, addresses", "aligned items of %zu and 8 bytes", "buffers of %zd and %zd bytes"),
            sizeof *step, steps.len, addresses.len);
    while (!PyErr_Occurred() && done < count) {
        s = vm_talloc_run(self->talloc, step + done, VM_MIN(count - done, AT_ONCE), addresses.buf, ids, &taken);
        done += taken;
        if (s) raise_status(self, s);
        if (s || PyErr_CheckSignals()) break;
        Py_BEGIN_ALLOW_THREADS
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&steps);
    PyBuffer_Release(&addresses);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(done);
}

/* ---- figures ---- */

static PyObject *allocator_reset_peak(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    vm_talloc_reset_peak(self->talloc);
    Py_RETURN_NONE;
}

static int put(PyObject *dict, const char *key, int64_t value) {
    PyObject *number = PyLong_FromLongLong(value);
    int bad = !number || PyDict_SetItemString(dict, key, number);
    Py_XDECREF(number);
    return bad;
}

static int put_stat(PyObject *dict, const char *name, const char *pool, const vm_talloc_stat *s) {
    static const char *const metric[] = {"current", "peak", "allocated", "freed"};
    const int64_t value[] = {s->current, s->peak, (int64_t)s->allocated, (int64_t)s->freed};
    char key[96];
    int bad = 0;
    for (int i = 0; !bad && i < 4; i++) {
        snprintf(key, sizeof key, "%s%s%s.%s", name, pool ? "." : "", pool ? pool : "", metric[i]);
        bad = put(dict, key, value[i]);
    }
    return bad;
}

static PyObject *allocator_stats(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    const vm_talloc_stats s = *vm_talloc_get_stats(self->talloc);
    const uint64_t split = vm_talloc_settings(self->talloc)->max_split_size;
    PyObject *dict = PyDict_New();
    int bad = !dict;
    for (int k = 0; k < VM_TALLOC_KINDS; k++)
        for (int p = 0; !bad && p < VM_TALLOC_POOLS; p++)
            bad = put_stat(dict, vm_talloc_kind_name[k], vm_talloc_pool_name[p], &s.of[k][p]);
    bad = bad || put_stat(dict, "oversize_allocations", NULL, &s.oversize_allocations) ||
          put_stat(dict, "oversize_segments", NULL, &s.oversize_segments) ||
          put(dict, "num_alloc_retries", s.num_alloc_retries) || put(dict, "num_ooms", s.num_ooms) ||
          put(dict, "num_sync_all_streams", s.num_sync_all_streams) ||
          put(dict, "num_device_alloc", s.num_device_alloc) || put(dict, "num_device_free", s.num_device_free) ||
          put(dict, "max_split_size", split == UINT64_MAX ? -1 : (int64_t)split);
    if (bad) Py_CLEAR(dict);
    return dict;
}

static const vm_talloc_stat *bytes_in_all(Allocator *self, vm_talloc_kind kind) {
    return &vm_talloc_get_stats(self->talloc)->of[kind][VM_TALLOC_ALL];
}

static PyObject *memory_allocated(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(bytes_in_all(self, VM_TALLOC_ALLOCATED_BYTES)->current);
}

static PyObject *max_memory_allocated(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(bytes_in_all(self, VM_TALLOC_ALLOCATED_BYTES)->peak);
}

static PyObject *memory_reserved(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(bytes_in_all(self, VM_TALLOC_RESERVED_BYTES)->current);
}

static PyObject *max_memory_reserved(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(bytes_in_all(self, VM_TALLOC_RESERVED_BYTES)->peak);
}

/* ---- snapshots ---- */

static PyObject *block_item(const void *blocks, size_t i) {
    const vm_talloc_block *b = (const vm_talloc_block *)blocks + i;
    static const char *const state[] = {"inactive", "active_pending_free", "active_allocated"};
    return Py_BuildValue("(OKKKKsOOI)", b->first ? Py_True : Py_False, (unsigned long long)b->address,
                         (unsigned long long)b->size, (unsigned long long)b->requested, (unsigned long long)b->stream,
                         state[b->state], b->small ? Py_True : Py_False, b->expandable ? Py_True : Py_False, b->tag);
}

static PyObject *allocator_blocks(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    const size_t n = vm_talloc_blocks(self->talloc, NULL);
    vm_talloc_block *block = PyMem_Calloc(n ? n : 1, sizeof *block);
    if (block) vm_talloc_blocks(self->talloc, block);
    PyObject *list = block ? vm_py_list(n, block_item, block) : PyErr_NoMemory();
    PyMem_Free(block);
    return list;
}

static PyObject *event_item(const void *talloc, size_t i) {
    size_t n;
    const vm_talloc_event *e = &vm_talloc_events(talloc, &n)[i];
    return Py_BuildValue("(sKKKI)", vm_talloc_action_name[e->action], (unsigned long long)e->address,
                         (unsigned long long)e->size, (unsigned long long)e->stream, e->tag);
}

static PyObject *allocator_events(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    size_t n;
    vm_talloc_events(self->talloc, &n);
    return vm_py_list(n, event_item, self->talloc);
}

static PyObject *allocator_settings(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    const vm_talloc_config *c = vm_talloc_settings(self->talloc);
    size_t divisions[VM_TALLOC_INTERVALS];
    for (int i = 0; i < VM_TALLOC_INTERVALS; i++) divisions[i] = c->roundup_divisions[i];
    return Py_BuildValue(
        "{s:K, s:K, s:K, s:K, s:K, s:N, s:d, s:O, s:O, s:O}", "total_memory", (unsigned long long)c->total_memory,
        "allowed_memory", (unsigned long long)c->allowed_memory, "max_split_size",
        (unsigned long long)c->max_split_size, "max_non_split_rounding", (unsigned long long)c->max_non_split_rounding,
        "reservation", (unsigned long long)c->reservation, "divisions", vm_py_sizes(divisions, VM_TALLOC_INTERVALS),
        "gc_threshold", c->gc_threshold, "expandable_segments", c->expandable_segments ? Py_True : Py_False,
        "driver_pool", c->driver_pool ? Py_True : Py_False, "history", c->history ? Py_True : Py_False);
}

/* ---- decisions that a replay imposes ---- */

static PyObject *allocator_place(Allocator *self, PyObject *where) {
    uint64_t address;
    if (to_uint64(where, "address", &address)) return NULL;
    return vm_py_none_or_raise(vm_talloc_place(self->talloc, address));
}

static PyObject *allocator_has_whole_segment(Allocator *self, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(vm_talloc_has_whole_segment(self->talloc));
}

static PyObject *allocator_release(Allocator *self, PyObject *where) {
    uint64_t address;
    if (to_uint64(where, "address", &address)) return NULL;
    return vm_py_none_or_raise(vm_talloc_release(self->talloc, address));
}

static PyObject *allocator_restore(Allocator *self, PyObject *args) {
    vm_talloc_block segment = {0};
    int small;
    PyObject *items, *list, *result = NULL;
    if (!PyArg_ParseTuple(args, "KKKpO", &segment.address, &segment.size, &segment.stream, &small, &items)) return NULL;
    segment.small = small;
    if (!(list = PySequence_Tuple(items))) return NULL; /* a copy, as in parse_divisions */
    const Py_ssize_t n = PyTuple_Size(list);
    vm_talloc_block *block = PyMem_Calloc(n ? (size_t)n : 1, sizeof *block);
    if (!block) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        vm_talloc_block *b = &block[i];
        int pending;
        PyObject *item = PyTuple_GetItem(list, i);
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "KKKp", &b->address, &b->size, &b->requested, &pending))
            goto done;
        b->state = pending ? VM_TALLOC_PENDING : VM_TALLOC_LIVE;
    }
    result = vm_py_none_or_raise(vm_talloc_restore(self->talloc, &segment, block, (size_t)n));
done:
    if (!result && !PyErr_Occurred()) vm_py_refuse(PyExc_TypeError, VM_EXPECTED("blocks", "tuples of four", ""));
    PyMem_Free(block);
    Py_DECREF(list);
    return result;
}

static PyObject *allocator_tag(Allocator *self, PyObject *number) {
    uint64_t tag;
    if (to_uint64(number, "tag", &tag)) return NULL;
    vm_talloc_tag(self->talloc, (uint32_t)tag);
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static PyMethodDef methods[] = {
    {"malloc", VM_PY_KEYWORDS(allocator_malloc), METH_VARARGS | METH_KEYWORDS,
     "malloc($self, /, bytes, stream=0)\n--\n\nAllocates bytes on a stream. Returns the address (0 for 0 "
     "bytes).\n\nRaises OutOfMemoryError if the simulated device is full."},
    {"free", VM_PY_KEYWORDS(allocator_free), METH_VARARGS | METH_KEYWORDS,
     "free($self, /, address, pending=False)\n--\n\nFrees the block at address. With pending, another stream "
     "still uses it: it is no longer allocated but stays active until it is freed again, or until the cache is "
     "emptied.\n\nRaises ValueError if no allocated block lies at address."},
    {"empty_cache", (PyCFunction)allocator_empty_cache, METH_NOARGS,
     "empty_cache($self, /)\n--\n\nReturns cached segments to the device, like torch.cuda.empty_cache."},
    {"rounded_size", (PyCFunction)allocator_round, METH_O,
     "rounded_size($self, bytes, /)\n--\n\nReturns the bytes of a block that a request uses."},
    {"run", (PyCFunction)allocator_run, METH_VARARGS,
     "run($self, steps, addresses, /)\n--\n\nRuns many steps in C. steps: array of (op, id: uint32, bytes, "
     "stream: uint64); op 0 malloc, 1 free, 2 empty_cache, 3 reset_peak_stats. addresses: array of uint64, by id, "
     "in and out. Returns how many steps were run."},
    {"reset_peak_stats", (PyCFunction)allocator_reset_peak, METH_NOARGS,
     "reset_peak_stats($self, /)\n--\n\nRestarts peaks from the current figures."},
    {"stats", (PyCFunction)allocator_stats, METH_NOARGS,
     "stats($self, /)\n--\n\nReturns the statistics as a dict, with the keys of torch.cuda.memory_stats."},
    {"memory_allocated", (PyCFunction)memory_allocated, METH_NOARGS,
     "memory_allocated($self, /)\n--\n\nReturns the bytes in live blocks."},
    {"max_memory_allocated", (PyCFunction)max_memory_allocated, METH_NOARGS,
     "max_memory_allocated($self, /)\n--\n\nReturns the peak of memory_allocated, in bytes."},
    {"memory_reserved", (PyCFunction)memory_reserved, METH_NOARGS,
     "memory_reserved($self, /)\n--\n\nReturns the bytes held from the device."},
    {"max_memory_reserved", (PyCFunction)max_memory_reserved, METH_NOARGS,
     "max_memory_reserved($self, /)\n--\n\nReturns the peak of memory_reserved, in bytes."},
    {"tag", (PyCFunction)allocator_tag, METH_O,
     "tag($self, number, /)\n--\n\nTags the blocks and events that follow with an index into the frames of "
     "save_snapshot."},
    {"_blocks", (PyCFunction)allocator_blocks, METH_NOARGS,
     "_blocks($self, /)\n--\n\nReturns [(first, address, size, requested, stream, state, small, expandable, "
     "tag)], by address."},
    {"_events", (PyCFunction)allocator_events, METH_NOARGS,
     "_events($self, /)\n--\n\nReturns [(action, address, size, stream, tag)], oldest first."},
    {"_settings", (PyCFunction)allocator_settings, METH_NOARGS,
     "_settings($self, /)\n--\n\nReturns the settings as a dict, in bytes."},
    {"_place", (PyCFunction)allocator_place, METH_O,
     "_place($self, address, /)\n--\n\nSets the address of the next new segment."},
    {"_has_whole_segment", (PyCFunction)allocator_has_whole_segment, METH_NOARGS,
     "_has_whole_segment($self, /)\n--\n\nReturns whether empty_cache would return some segment as a whole."},
    {"_release", (PyCFunction)allocator_release, METH_O,
     "_release($self, address, /)\n--\n\nReturns the segment at address to the device. Raises ValueError if "
     "empty_cache would return none there."},
    {"_restore", (PyCFunction)allocator_restore, METH_VARARGS,
     "_restore($self, address, size, stream, small, blocks, /)\n--\n\nRecreates a segment; blocks: [(address, "
     "size, requested, pending)], by address."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, allocator_new},
    {Py_tp_dealloc, allocator_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "PyTorch's CUDA caching allocator without the memory, with settings in bytes."},
    {0, NULL}};

static PyType_Spec spec = {.name = "vaemem._core.CachingAllocator",
                           .basicsize = sizeof(Allocator),
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                           .slots = slots};

int vm_py_add_allocator(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    PyObject *error = PyErr_NewExceptionWithDoc(
        "vaemem.OutOfMemoryError",
        "The simulated device is full. Attributes, in bytes: requested (by the caller), "
        "wanted (of the device), total,\n"
        "free and allowed (of the device; 0: without end, or not set), allocated, reserved. And "
        "tag: of the request.",
        PyExc_MemoryError, NULL);
    int bad = !type || !error || PyObject_SetAttrString(type, "OutOfMemoryError", error) ||
              PyModule_AddObjectRef(module, "OutOfMemoryError", error) ||
              PyModule_AddObjectRef(module, "CachingAllocator", type);
    Py_XDECREF(type);
    Py_XDECREF(error);
    return bad ? -1 : 0;
}
