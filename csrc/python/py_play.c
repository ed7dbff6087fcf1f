/* vaemem._core.Play: a script, played on a simulated device. vaemem/prediction/process.py wraps it. */
#include "../predict/judge.h"
#include "py.h"

typedef struct Play {
    PyObject_HEAD
    vm_play *play;
    vm_script *written;  /* of script, to write what failed */
    PyObject *script;    /* a Script */
    PyObject *allocator; /* a CachingAllocator */
} Play;

#define CHANGED VM_EXPECTED("workspaces", "a script that does not change while they are read", "")

static const char *const cublaslt_name[] = {"each", "kept", "shared"};

/* Makes a Play that holds its script and its allocator. */
static Play *new_play(PyTypeObject *type, PyObject *script, PyObject *allocator) {
    vm_script *const written = vm_py_script(script);
    if (!written) return (Play *)vm_py_refuse_type("script", "a Script", script);
    if (!vm_py_allocator(allocator)) return NULL;
    Play *self = (Play *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->written = written;
    self->script = Py_NewRef(script);
    self->allocator = Py_NewRef(allocator);
    return self;
}

static PyObject *play_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"script", "allocator", "memory", "cublas_bytes", "cublaslt_bytes", "cublaslt_use", NULL};
    PyObject *script, *allocator;
    unsigned long long memory, cublas, cublaslt;
    const char *use;
    int u = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOKKKs:Play", names, &script, &allocator, &memory, &cublas,
                                     &cublaslt, &use))
        return NULL;
    while (u < 3 && strcmp(use, cublaslt_name[u])) u++;
    if (u == 3)
        return vm_py_refuse(PyExc_ValueError, VM_EXPECTED("cublaslt_use", "one of 'each', 'kept', 'shared'", "'%s'"),
                            use);
    Play *self = new_play(type, script, allocator);
    if (!self) return NULL;
    const vm_blas blas = {cublas, cublaslt, (vm_cublaslt)u};
    return vm_py_made((PyObject *)self,
                      vm_play_new(self->written, vm_py_allocator(allocator), &blas, memory, &self->play));
}

static int play_traverse(Play *self, visitproc visit, void *arg) {
    Py_VISIT(self->allocator);
    Py_VISIT(self->script);
    Py_VISIT(Py_TYPE((PyObject *)self));
    return 0;
}

static int play_clear(Play *self) {
    vm_play_free(self->play);
    self->play = NULL;
    Py_CLEAR(self->allocator);
    Py_CLEAR(self->script);
    return 0;
}

static void play_dealloc(Play *self) {
    PyObject_GC_UnTrack(self);
    play_clear(self);
    vm_py_free((PyObject *)self);
}

/* -1 with an exception set if the status is a failure. */
static int check(Play *self, vm_status s) {
    const vm_talloc_oom *full = s ? vm_play_oom(self->play) : NULL;
    if (full)
        vm_py_raise_full(self->allocator, full);
    else if (s)
        vm_py_raise(s);
    return s ? -1 : 0;
}

/* ---- playing ---- */

static PyObject *play_elsewhere(Play *self, PyObject *args) {
    PyObject *allocator;
    unsigned long long memory;
    if (!PyArg_ParseTuple(args, "OK:elsewhere", &allocator, &memory)) return NULL;
    Play *other = new_play(Py_TYPE((PyObject *)self), self->script, allocator);
    if (!other) return NULL;
    return vm_py_made((PyObject *)other,
                      vm_play_elsewhere(self->play, vm_py_allocator(allocator), memory, false, &other->play));
}

/* Reads two sequences of `count` workspaces, for PyMem_Free; -1 with an exception set. */
static int to_answers(PyObject *workspaces, PyObject *following, size_t count, uint64_t **workspace, uint64_t **next) {
    size_t first = 0, others = 0;
    *next = NULL;
    if ((*workspace = vm_py_to_numbers("workspaces", workspaces, &first)))
        *next = vm_py_to_numbers("next", following, &others);
    if (*next && first == count && others == count) return 0;
    if (*next)
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("workspaces, next", "%zu of each", "%zu and %zu"), count, first,
                     others);
    PyMem_Free(*workspace);
    PyMem_Free(*next);
    return -1;
}

static PyObject *play_answer(Play *self, PyObject *args) {
    PyObject *workspaces, *following;
    uint64_t *workspace, *next;
    if (!PyArg_ParseTuple(args, "OO:answer", &workspaces, &following)) return NULL;
    const size_t convs = self->written->convs;
    if (to_answers(workspaces, following, convs, &workspace, &next)) return NULL;
    if (self->written->convs == convs)
        vm_py_check(vm_play_answer(self->play, workspace, next));
    else
        vm_py_refuse(PyExc_ValueError, CHANGED);
    PyMem_Free(workspace);
    PyMem_Free(next);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *play_call(Play *self, PyObject *args) {
    PyObject *trace, *workspaces, *following, *left = NULL;
    uint64_t *workspace, *next;
    const vm_event *e;
    if (!PyArg_ParseTuple(args, "OOO:call", &trace, &workspaces, &following)) return NULL;
    vm_trace *const t = vm_py_trace(trace);
    if (!t || to_answers(workspaces, following, t->convs, &workspace, &next)) return NULL;
    if (!vm_py_check(vm_script_call(self->written, t, &e))) {
        const vm_event event = *e;
        const vm_status s = vm_play_answer_call(self->play, &self->written->call[event.of], workspace, next);
        if (!check(self, s ? s : vm_play_follow(self->play, self->written))) left = vm_py_left(self->written, &event);
        if (s) vm_script_failed(self->written, 0);
    }
    PyMem_Free(workspace);
    PyMem_Free(next);
    return left;
}

static PyObject *play_run(Play *self, PyObject *Py_UNUSED(ignored)) {
    size_t taken;
    return check(self, vm_play_run(self->play, &taken)) ? NULL : Py_NewRef(Py_None);
}

static PyObject *play_follow(Play *self, PyObject *Py_UNUSED(ignored)) {
    return check(self, vm_play_follow(self->play, self->written)) ? NULL : Py_NewRef(Py_None);
}

static PyObject *play_note_heights(Play *self, PyObject *notes) {
    const int is = PyObject_IsTrue(notes);
    if (is < 0) return NULL;
    vm_play_note_heights(self->play, is);
    Py_RETURN_NONE;
}

/* Numbers that few callers read: a list of them would take longer than the play. */
typedef struct Column {
    PyObject_HEAD
    size_t count;
    uint64_t *number;
} Column;

static PyObject *to_column(PyTypeObject *type, const uint64_t *number, size_t count) {
    Column *self = (Column *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    const vm_status s = vm_scratch_new(count, sizeof *number, &self->number);
    if (s) return vm_py_made((PyObject *)self, s);
    if (count) memcpy(self->number, number, count * sizeof *number);
    self->count = count;
    return (PyObject *)self;
}

static void column_dealloc(Column *self) {
    vm_scratch_free(self->number);
    vm_py_free((PyObject *)self);
}

static PyObject *column_tolist(Column *self, PyObject *Py_UNUSED(ignored)) {
    return vm_py_list(self->count, vm_py_number_item, self->number);
}

static PyObject *play_heights(Play *self, void *Py_UNUSED(closure)) {
    const vm_heights *const h = vm_play_heights(self->play);
    const size_t steps = h->of ? h->of->trace->steps : 0;
    PyObject *module = PyType_GetModule(Py_TYPE((PyObject *)self));
    PyObject *type = module ? PyObject_GetAttrString(module, "Column") : NULL;
    PyObject *allocated = type ? to_column((PyTypeObject *)type, h->allocated, steps) : NULL;
    PyObject *reserved = allocated ? to_column((PyTypeObject *)type, h->reserved, steps) : NULL;
    Py_XDECREF(type);
    if (reserved) return Py_BuildValue("NN", allocated, reserved);
    Py_XDECREF(allocated);
    return NULL;
}

/* ---- what happened ---- */

static PyObject *reading_item(const void *readings, size_t i) {
    const vm_reading *const r = &((const vm_reading *)readings)[i];
    return Py_BuildValue("((nn)KKKK)", (Py_ssize_t)r->span.since, (Py_ssize_t)r->span.until,
                         (unsigned long long)r->base_allocated, (unsigned long long)r->base_reserved,
                         (unsigned long long)r->peak_allocated, (unsigned long long)r->peak_reserved);
}

static PyObject *play_readings(Play *self, void *Py_UNUSED(closure)) {
    size_t count;
    const vm_reading *const reading = vm_play_readings(self->play, &count);
    return vm_py_list(count, reading_item, reading);
}

static PyObject *play_most_reserved(Play *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(vm_play_most_reserved(self->play));
}

static PyObject *play_refused(Play *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(vm_play_refused(self->play));
}

typedef struct named {
    const vm_names *names;
    const vm_live_list *list;
} named;

static PyObject *named_item(const void *context, size_t i) {
    const named *n = context;
    const vm_live *one = &n->list->item[i];
    if (!one->bytes) return NULL;
    return Py_BuildValue("(NKK)", PyUnicode_FromString(vm_names_get(n->names, one->name)),
                         (unsigned long long)one->bytes, (unsigned long long)one->rounded);
}

static PyObject *play_peak(Play *self, PyObject *args) {
    const vm_names *names = &self->written->names;
    vm_live_list list;
    uint32_t step;
    Py_ssize_t reading = -1;
    if (!PyArg_ParseTuple(args, "|n:peak", &reading)) return NULL;
    if (vm_py_check(vm_play_peak(self->play, (size_t)reading, &list, &step))) return NULL;
    PyObject *name = step == VM_NO_NAME ? Py_NewRef(Py_None) : PyUnicode_FromString(vm_names_get(names, step));
    PyObject *tensors = vm_py_list(list.count, named_item, &(named){names, &list});
    vm_scratch_free(list.item);
    return Py_BuildValue("NN", name, tensors);
}

static PyObject *play_baseline(Play *self, PyObject *Py_UNUSED(ignored)) {
    vm_live_list list;
    if (vm_py_check(vm_play_baseline(self->play, &list))) return NULL;
    PyObject *tensors = vm_py_list(list.count, named_item, &(named){&self->written->names, &list});
    vm_scratch_free(list.item);
    return tensors;
}

/* ---- other devices, other workspaces ---- */

static PyObject *play_least(Play *self, PyObject *args) {
    unsigned long long low, high;
    int first_only;
    uint64_t least;
    if (!PyArg_ParseTuple(args, "pKK:least", &first_only, &low, &high)) return NULL;
    const vm_status s = vm_judge_least(self->play, first_only, low, high, &least);
    return s ? vm_py_raise(s) : PyLong_FromUnsignedLongLong(least);
}

/* Converts a tuple of sequences of `count` integers to rows; NULL with an exception set. */
static uint64_t *to_rows(const char *name, PyObject *rows, size_t count) {
    const size_t many = (size_t)PyTuple_Size(rows);
    uint64_t *number = PyMem_Calloc(many * count + 1, sizeof *number);
    if (!number) PyErr_NoMemory();
    for (size_t i = 0; number && i < many; i++) {
        size_t got = 0;
        uint64_t *row = vm_py_to_numbers(name, PyTuple_GetItem(rows, (Py_ssize_t)i), &got);
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

/* Converts rows of workspaces of the script's convolutions; NULL with an exception set. */
static uint64_t *to_workspaces(Play *self, PyObject *rows) {
    const size_t convs = self->written->convs;
    uint64_t *workspace = to_rows("workspaces", rows, convs);
    if (!workspace || self->written->convs == convs) return workspace;
    vm_py_refuse(PyExc_ValueError, CHANGED);
    PyMem_Free(workspace);
    return NULL;
}

typedef struct table {
    const uint64_t *number;
    size_t columns;
} table;

static PyObject *row_item(const void *context, size_t i) {
    const table *t = context;
    return vm_py_list(t->columns, vm_py_number_item, t->number + i * t->columns);
}

static PyObject *play_rows(Play *self, PyObject *args) {
    PyObject *rows = NULL, *pairs = NULL, *list = NULL;
    uint64_t *workspace = NULL, *number = NULL, *most = NULL;
    int above = 1;
    if (!PyArg_ParseTuple(args, "O!O!|p:rows", &PyTuple_Type, &rows, &PyTuple_Type, &pairs, &above)) return NULL;
    const size_t count = (size_t)PyTuple_Size(rows), spans = (size_t)PyTuple_Size(pairs);
    if ((number = to_rows("spans", pairs, 2))) workspace = to_workspaces(self, rows);
    vm_span *span = workspace ? PyMem_Calloc(spans + 1, sizeof *span) : NULL;
    if (span && !(most = PyMem_Calloc(count * spans + 1, sizeof *most))) PyErr_NoMemory();
    for (size_t i = 0; most && i < spans; i++) span[i] = (vm_span){(size_t)number[2 * i], (size_t)number[2 * i + 1]};
    if (most && !vm_py_check(vm_play_rows(self->play, span, spans, above, workspace, count, most)))
        list = vm_py_list(count, row_item, &(table){most, spans});
    PyMem_Free(most);
    PyMem_Free(span);
    PyMem_Free(workspace);
    PyMem_Free(number);
    return list;
}

static PyObject *play_takes(Play *self, PyObject *args) {
    PyObject *tuples, *rows;
    Py_ssize_t likely;
    int above;
    vm_takes takes = {0};
    uint64_t *workspace = NULL, *number;
    if (!PyArg_ParseTuple(args, "O!pO!n:takes", &PyTuple_Type, &tuples, &above, &PyTuple_Type, &rows, &likely))
        return NULL;
    const size_t count = (size_t)PyTuple_Size(rows), phases = (size_t)PyTuple_Size(tuples);
    if ((number = to_rows("phases", tuples, 4))) workspace = to_workspaces(self, rows);
    vm_judge_phase *phase = workspace ? PyMem_Calloc(phases + 1, sizeof *phase) : NULL;
    for (size_t i = 0; phase && i < phases; i++) {
        const uint64_t *const one = number + 4 * i;
        phase[i] = (vm_judge_phase){(size_t)VM_MIN(one[0], UINT32_MAX), one[1], one[2], one[3]};
    }
    if (workspace && !phase)
        PyErr_NoMemory();
    else if (workspace && likely < 0)
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("likely", "0 or more", "%zd"), likely);
    else if (workspace)
        vm_py_check(vm_judge_rows(self->play, phase, phases, above, workspace, count, (size_t)likely, &takes));
    PyMem_Free(phase);
    PyMem_Free(workspace);
    PyMem_Free(number);
    if (PyErr_Occurred()) return NULL;
    return Py_BuildValue("(KKKK)", (unsigned long long)takes.own, (unsigned long long)takes.least,
                         (unsigned long long)takes.most, (unsigned long long)takes.bound);
}

/* ---- the type ---- */

static PyMethodDef methods[] = {
    {"run", (PyCFunction)play_run, METH_NOARGS,
     "run($self, /)\n--\n\nPlays the events that were not played yet, up to one that fails."},
    {"follow", (PyCFunction)play_follow, METH_NOARGS,
     "follow($self, /)\n--\n\nPlays the event that was just written. If the event fails, the script forgets it."},
    {"call", (PyCFunction)play_call, METH_VARARGS,
     "call($self, trace, workspaces, next, /)\n--\n\nWrites a call of a trace to the script, and plays it. Its "
     "convolutions take these workspaces, or those of next if they cannot be allocated. Returns {id: handle} of the "
     "storages that it leaves."},
    {"answer", (PyCFunction)play_answer, METH_VARARGS,
     "answer($self, workspaces, next, /)\n--\n\nSets the workspaces of the script's convolutions, and those of cuDNN's "
     "next plans, which are used if the first cannot be allocated."},
    {"elsewhere", (PyCFunction)play_elsewhere, METH_VARARGS,
     "elsewhere($self, allocator, memory, /)\n--\n\nReturns a new play of the same script with the same workspaces on "
     "another device. memory: its bytes, as a program sees them."},
    {"note_heights", (PyCFunction)play_note_heights, METH_O,
     "note_heights($self, notes, /)\n--\n\nNotes the heights of calls' steps from now on, or no longer."},
    {"peak", (PyCFunction)play_peak, METH_VARARGS,
     "peak($self, reading=-1, /)\n--\n\nReturns (name of the call's step that makes the peak or None, [(name, "
     "bytes, bytes added by rounding outside of calls)] of the storages live then): of a reading, or since the "
     "last reset."},
    {"baseline", (PyCFunction)play_baseline, METH_NOARGS,
     "baseline($self, /)\n--\n\nReturns the storages live when the peak was reset, in peak's format."},
    {"least", (PyCFunction)play_least, METH_VARARGS,
     "least($self, first_only, low, high, /)\n--\n\nReturns the bytes of the smallest device on which the script "
     "succeeds, in pages of 2 MiB. first_only: cuDNN's next plans need as much as the first ones. low: too few bytes; "
     "high: enough, as far as known."},
    {"rows", (PyCFunction)play_rows, METH_VARARGS,
     "rows($self, rows, spans, above=True, /)\n--\n\nReturns the most bytes that the same events would have reserved "
     "in each span (since, until) of events, on fresh devices like the play's: a list for each row of workspaces of "
     "the script's convolutions. above: only bytes beyond those reserved before the span."},
    {"takes", (PyCFunction)play_takes, METH_VARARGS,
     "takes($self, phases, above, rows, likely, /)\n--\n\nReturns (as played, least, most, bound): bytes of the phases "
     "over rows of other plausible workspaces. phases: (number of its reading, bytes outside PyTorch, bytes that are "
     "exact, whether it counts for the bound alone). above: only bytes beyond the baselines. The first `likely` rows "
     "count for the least and the most, all for the bound."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef attributes[] = {
    {"heights", (getter)play_heights, NULL,
     "Bytes allocated and reserved at the height of each step of the last call, if they are noted.", NULL},
    {"readings", (getter)play_readings, NULL,
     "[((since, until) in events, allocated and reserved at the reset, the same at the peak)] of the phases, in bytes.",
     NULL},
    {"most_reserved", (getter)play_most_reserved, NULL, "The most bytes reserved so far.", NULL},
    {"refused", (getter)play_refused, NULL, "How many convolutions were refused their workspace so far.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, play_new},
                              {Py_tp_dealloc, play_dealloc},
                              {Py_tp_traverse, play_traverse},
                              {Py_tp_clear, play_clear},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, attributes},
                              {Py_tp_doc, "A script, played on a simulated device."},
                              {0, NULL}};

static PyMethodDef column_methods[] = {
    {"tolist", (PyCFunction)column_tolist, METH_NOARGS, "tolist($self, /)\n--\n\nReturns the numbers."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot column_slots[] = {{Py_tp_dealloc, column_dealloc},
                                     {Py_tp_methods, column_methods},
                                     {Py_tp_doc, "Numbers of a call's steps."},
                                     {0, NULL}};

PyType_Spec vm_py_column_type = {
    .name = "vaemem._core.Column", .basicsize = sizeof(Column), .flags = Py_TPFLAGS_DEFAULT, .slots = column_slots};

PyType_Spec vm_py_play_type = {.name = "vaemem._core.Play",
                               .basicsize = sizeof(Play),
                               .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                               .slots = slots};
