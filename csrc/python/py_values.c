/* Converts between Python's values and the core's: sizes, architectures, backends, precisions. */
#include "../predict/trace/trace.h"
#include "py.h"

static PyObject *size_item(const void *size, size_t i) { return PyLong_FromSize_t(((const size_t *)size)[i]); }

static PyObject *float_item(const void *number, size_t i) {
    return PyFloat_FromDouble((double)((const float *)number)[i]);
}

static PyObject *bool_item(const void *flag, size_t i) { return PyBool_FromLong(((const bool *)flag)[i]); }

static PyObject *tuple(size_t n, PyObject *(*item)(const void *context, size_t i), const void *context) {
    PyObject *list = vm_py_list(n, item, context), *made = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return made;
}

PyObject *vm_py_sizes(const size_t *size, size_t count) { return tuple(count, size_item, size); }

/* ---- lists of tuples ---- */

/* Reads tuples into *items of `size` bytes each, by `read`, which sets an exception if a tuple is wrong. Returns: a new
 * reference that keeps the tuples' texts; NULL with an exception set, and no items. */
static PyObject *read_tuples(PyObject *given, const char *name, size_t size, void (*read)(PyObject *one, void *item),
                             size_t *count, void **items) {
    PyObject *texts = PySequence_Tuple(given); /* a copy: its texts are borrowed */
    *count = 0, *items = NULL;
    if (!texts) return NULL;
    const size_t n = (size_t)PyTuple_Size(texts);
    char *each = PyMem_Calloc(n + 1, size);
    if (!each) PyErr_NoMemory();
    for (size_t i = 0; each && i < n && !PyErr_Occurred(); i++) {
        PyObject *one = PyTuple_GetItem(texts, (Py_ssize_t)i);
        if (PyTuple_Check(one))
            read(one, each + i * size);
        else
            vm_py_refuse(PyExc_TypeError, VM_EXPECTED("%s", "tuples", "%R"), name, one);
    }
    if (PyErr_Occurred()) {
        PyMem_Free(each);
        Py_DECREF(texts);
        return NULL;
    }
    *count = n, *items = each;
    return texts;
}

static void read_passing(PyObject *one, void *item) {
    vm_passing *p = item;
    int by = 0, early = 0;
    unsigned long long bytes = 0, row_bytes = 0, row_flops = 0;
    if (PyArg_ParseTuple(one, "sssKi|KKIIp:passing", &p->module, &p->until, &p->name, &bytes, &by, &row_bytes,
                         &row_flops, &p->lives, &p->stream, &early))
        p->bytes = bytes, p->by = (vm_sender)by, p->row_bytes = row_bytes, p->row_flops = row_flops,
        p->early = early != 0;
}

PyObject *vm_py_to_passings(PyObject *given, void *out) {
    vm_passings *to = out;
    void *items;
    PyObject *texts = read_tuples(given, "passing", sizeof *to->item, read_passing, &to->count, &items);
    to->item = items;
    return texts;
}

static void read_companion(PyObject *one, void *item) {
    vm_companion *c = item;
    unsigned long long rank = 0, rows = 0, columns = 0;
    if (!PyArg_ParseTuple(one, "sKKK:companions", &c->module, &rank, &rows, &columns)) return;
    if (!rank || !rows || !columns)
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED("companions", "a rank and sides above 0", "%R"), one);
    c->rank = rank, c->rows = rows, c->columns = columns;
}

PyObject *vm_py_to_companions(PyObject *given, void *out) {
    vm_companions *to = out;
    void *items;
    PyObject *texts = read_tuples(given, "companions", sizeof *to->item, read_companion, &to->count, &items);
    to->item = items;
    return texts;
}

/* ---- architectures ---- */

/* Adds an arch's own value; steals the reference to it. */
static int put(PyObject *dict, const char *key, PyObject *value) {
    const int failed = !dict || !value || PyDict_SetItemString(dict, key, value);
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

static const char *const families[] = {
    [VM_KL] = "kl", [VM_WAN] = "wan", [VM_HUNYUAN_IMAGE] = "hunyuan_image", [VM_TINY] = "tiny", [VM_LTX] = "ltx"};

/* What a resampler of VM_LTX does, in diffusers' words. */
static const char *const resamplers[] = {"none", [VM_SPACE] = "spatial", [VM_TIME] = "temporal",
                                         [VM_SPACE | VM_TIME] = "spatiotemporal"};

static PyObject *resampler_item(const void *what, size_t i) {
    return PyUnicode_FromString(resamplers[((const uint8_t *)what)[i]]);
}

/* Adds the fields of VM_LTX. */
static int put_halves(PyObject *dict, const vm_arch *a) {
    const struct vm_half *down = &a->half[VM_ENCODE], *up = &a->half[VM_DECODE];
    const size_t downs = vm_arch_levels(a, VM_ENCODE), ups = vm_arch_levels(a, VM_DECODE);
    return put(dict, "decoder_block_out_channels", vm_py_sizes(a->decoder_block_out_channels, ups)) ||
           put(dict, "encoder_layers_per_block", vm_py_sizes(down->layers, downs + 1)) ||
           put(dict, "decoder_layers_per_block", vm_py_sizes(up->layers, ups + 1)) ||
           put(dict, "downsample_type", tuple(downs, resampler_item, down->resamplers)) ||
           put(dict, "upsample_type", tuple(ups, resampler_item, up->resamplers)) ||
           put(dict, "upsample_factor", vm_py_sizes(up->factor, ups)) ||
           put(dict, "upsample_residual", tuple(ups, bool_item, up->added)) ||
           put(dict, "encoder_causal", PyBool_FromLong(down->causal)) ||
           put(dict, "decoder_causal", PyBool_FromLong(up->causal)) ||
           put(dict, "encoder_reflects", PyBool_FromLong(down->mirrored)) ||
           put(dict, "decoder_reflects", PyBool_FromLong(up->mirrored));
}

PyObject *vm_py_arch_to_dict(const vm_arch *a) {
    PyObject *dict = Py_BuildValue(
        "{s:s, s:n, s:n, s:n, s:N, s:n, s:n, s:f, s:N, s:N, s:N, s:N, s:f}", "name", a->name, "in_channels",
        (Py_ssize_t)a->in_channels, "out_channels", (Py_ssize_t)a->out_channels, "latent_channels",
        (Py_ssize_t)a->latent_channels, "block_out_channels", vm_py_sizes(a->block_out_channels, a->levels),
        "layers_per_block", (Py_ssize_t)a->layers_per_block, "norm_num_groups", (Py_ssize_t)a->norm_num_groups,
        "norm_eps", a->norm_eps, "use_quant_conv", PyBool_FromLong(a->use_quant_conv), "use_post_quant_conv",
        PyBool_FromLong(a->use_post_quant_conv), "mid_block_add_attention", PyBool_FromLong(a->mid_block_add_attention),
        "scaling_factor", a->scaling_known ? PyFloat_FromDouble((double)a->scaling_factor) : Py_NewRef(Py_None),
        "shift_factor", a->shift_factor);
    int failed = !dict || (a->family && put(dict, "family", PyUnicode_FromString(families[a->family])));
    if (!failed && a->family == VM_WAN && !a->slices) failed = put(dict, "slices", Py_NewRef(Py_False));
    if (!failed && a->videos) failed = put(dict, "videos", Py_NewRef(Py_True));
    if (!failed && a->residual) failed = put(dict, "temperal_downsample", tuple(a->levels - 1, bool_item, a->temporal));
    if (!failed && a->image_patch) failed = put(dict, "image_patch", PyLong_FromSize_t(a->image_patch));
    if (!failed && a->family == VM_LTX)
        failed = put_halves(dict, a);
    else if (!failed && a->decoder_block_out_channels[0])
        failed = put(dict, "decoder_block_out_channels", vm_py_sizes(a->decoder_block_out_channels, a->levels));
    if (!failed && a->statistics)
        failed = put(dict, "latents_mean", tuple(a->statistics, float_item, a->latents_mean)) ||
                 put(dict, "latents_std", tuple(a->statistics, float_item, a->latents_std));
    if (!failed && a->patch_size[0])
        failed = put(dict, "patch_size", vm_py_sizes(a->patch_size, 2)) ||
                 put(dict, "batch_norm_eps", PyFloat_FromDouble((double)a->batch_norm_eps));
    if (failed) Py_CLEAR(dict);
    return dict;
}

static PyObject *item(PyObject *dict, const char *key) {
    PyObject *v = PyDict_GetItemString(dict, key);
    if (!v) vm_py_refuse(PyExc_ValueError, VM_EXPECTED("arch", "the key %s, it is missing", ""), key);
    return v;
}

/* Returns: 0; -1 with an exception set, which names the key if the value is wrong. */
static int check_value(const char *key, const char *want, PyObject *value) {
    if (!PyErr_Occurred()) return 0;
    if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_OverflowError))
        vm_py_refuse(PyExc_TypeError, VM_EXPECTED_IN("arch", "%s", "%s", "%R"), key, want, value);
    return -1;
}

static int to_size(PyObject *value, const char *key, size_t *out) {
    PyObject *index = PyNumber_Index(value);
    *out = index ? PyLong_AsSize_t(index) : 0;
    Py_XDECREF(index);
    return check_value(key, "a whole number of 0 or more", value);
}

static int to_float(PyObject *value, const char *key, float *out) {
    *out = (float)PyFloat_AsDouble(value);
    return check_value(key, "a number", value);
}

static int get_size(PyObject *dict, const char *key, size_t *out) {
    PyObject *v = item(dict, key);
    return v ? to_size(v, key, out) : -1;
}

static int get_float(PyObject *dict, const char *key, float *out) {
    PyObject *v = item(dict, key);
    return v ? to_float(v, key, out) : -1;
}

static int get_bool(PyObject *dict, const char *key, bool *out) {
    PyObject *v = item(dict, key);
    int truth = v ? PyObject_IsTrue(v) : -1;
    *out = truth > 0;
    return truth < 0 ? -1 : 0;
}

/* Reads a sequence of at most `most` numbers, and its length. */
static int get_numbers(PyObject *value, const char *key, size_t *sizes, float *numbers, size_t most, size_t *count) {
    PyObject *list = PySequence_Tuple(value); /* a copy: an item's __float__ may change the sequence */
    if (!list && PyErr_ExceptionMatches(PyExc_TypeError))
        vm_py_refuse(PyExc_TypeError, VM_EXPECTED_IN("arch", "%s", "a sequence of numbers", "%R"), key, value);
    if (!list) return -1;
    *count = (size_t)PyTuple_Size(list);
    int failed = 0;
    for (size_t i = 0; i < *count && i < most && !failed; i++) {
        PyObject *number = PyTuple_GetItem(list, (Py_ssize_t)i);
        failed = sizes ? to_size(number, key, &sizes[i]) : to_float(number, key, &numbers[i]);
    }
    Py_DECREF(list);
    return failed;
}

static int get_widths(PyObject *dict, vm_arch *a) {
    PyObject *v = item(dict, "block_out_channels"); /* vm_arch_check refuses too many */
    return v ? get_numbers(v, "block_out_channels", a->block_out_channels, NULL, VM_MAX_LEVELS, &a->levels) : -1;
}

/* Reads an optional list, or None: `wanted` numbers if present. */
static int get_list(PyObject *dict, const char *key, size_t *sizes, float *numbers, size_t wanted, bool *has) {
    PyObject *v = PyDict_GetItemString(dict, key);
    size_t count = 0;
    *has = v && v != Py_None;
    if (!*has) return 0;
    if (get_numbers(v, key, sizes, numbers, wanted, &count)) return -1;
    if (count == wanted) return 0;
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED_IN("arch", "%s", "%zu numbers", "%zu"), key, wanted, count);
    return -1;
}

/* Reads an optional word. */
static int get_family(PyObject *dict, vm_family *out) {
    PyObject *v = PyDict_GetItemString(dict, "family");
    const char *text = v && v != Py_None ? PyUnicode_AsUTF8AndSize(v, NULL) : "kl";
    if (!text) return check_value("family", "text", v);
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        *out = (vm_family)i;
        if (!strcmp(text, families[i])) return 0;
    }
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED_IN("arch", "family", "kl, wan, hunyuan_image, tiny or ltx", "%R"), v);
    return -1;
}

/* Reads the list of what the resamplers of a half of VM_LTX do. */
static int get_resamplers(PyObject *dict, const char *key, uint8_t *to, size_t count) {
    PyObject *v = item(dict, key), *list = v ? PySequence_Tuple(v) : NULL;
    if (v && !list) return check_value(key, "a list of words", v);
    if (!list) return -1;
    int failed = (size_t)PyTuple_Size(list) != count;
    for (size_t i = 0; i < count && !failed; i++) {
        PyObject *word = PyTuple_GetItem(list, (Py_ssize_t)i);
        to[i] = UINT8_MAX;
        for (size_t what = 0; what < sizeof resamplers / sizeof *resamplers; what++)
            if (PyUnicode_Check(word) && !PyUnicode_CompareWithASCIIString(word, resamplers[what]))
                to[i] = (uint8_t)what;
        failed = to[i] == UINT8_MAX;
    }
    if (failed)
        vm_py_refuse(PyExc_ValueError,
                     VM_EXPECTED_IN("arch", "%s", "%zu of none, spatial, temporal or spatiotemporal", "%R"), key, count,
                     v);
    Py_DECREF(list);
    return failed ? -1 : 0;
}

/* Reads a list of `count` numbers. */
static int get_counts(PyObject *dict, const char *key, size_t *to, size_t count) {
    bool has;
    if (!item(dict, key) || get_list(dict, key, to, NULL, count, &has)) return -1;
    if (!has) vm_py_refuse(PyExc_ValueError, VM_EXPECTED_IN("arch", "%s", "%zu numbers", "None"), key, count);
    return has ? 0 : -1;
}

/* Reads the fields of VM_LTX. A decoder has as many blocks as its widths, at most as many as the encoder. */
static int get_halves(PyObject *dict, vm_arch *a) {
    struct vm_half *down = &a->half[VM_ENCODE], *up = &a->half[VM_DECODE];
    const char *const widths = "decoder_block_out_channels";
    size_t ups = 0, added[VM_MAX_LEVELS] = {0};
    PyObject *v = item(dict, widths);
    if (!v || get_numbers(v, widths, a->decoder_block_out_channels, NULL, VM_MAX_LEVELS, &ups)) return -1;
    if (!ups || ups > a->levels || a->levels > VM_MAX_LEVELS) {
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED_IN("arch", "%s", "1 to %zu numbers", "%zu"), widths,
                     VM_MIN(a->levels, (size_t)VM_MAX_LEVELS), ups);
        return -1;
    }
    if (get_counts(dict, "encoder_layers_per_block", down->layers, a->levels + 1) ||
        get_counts(dict, "decoder_layers_per_block", up->layers, ups + 1) ||
        get_counts(dict, "upsample_factor", up->factor, ups) || get_counts(dict, "upsample_residual", added, ups) ||
        get_resamplers(dict, "downsample_type", down->resamplers, a->levels) ||
        get_resamplers(dict, "upsample_type", up->resamplers, ups) || get_bool(dict, "encoder_causal", &down->causal) ||
        get_bool(dict, "decoder_causal", &up->causal) || get_bool(dict, "encoder_reflects", &down->mirrored) ||
        get_bool(dict, "decoder_reflects", &up->mirrored))
        return -1;
    for (size_t i = 0; i < ups; i++) up->added[i] = added[i] != 0;
    return 0;
}

/* Optional for VM_WAN: whether it has slices (the default) and keeps all of them, and the fields of a residual one. */
static int get_frames(PyObject *dict, vm_arch *a) {
    PyObject *slices = PyDict_GetItemString(dict, "slices"), *patch = PyDict_GetItemString(dict, "image_patch");
    PyObject *videos = PyDict_GetItemString(dict, "videos");
    size_t temporal[VM_MAX_LEVELS] = {0};
    const size_t levels = VM_MIN(a->levels, VM_MAX_LEVELS);
    const int sliced = !slices || slices == Py_None ? 1 : PyObject_IsTrue(slices);
    const int of_videos = videos ? PyObject_IsTrue(videos) : 0;
    if (sliced < 0 || of_videos < 0 ||
        get_list(dict, "temperal_downsample", temporal, NULL, levels ? levels - 1 : 0, &a->residual))
        return -1;
    if (patch && patch != Py_None && to_size(patch, "image_patch", &a->image_patch)) return -1;
    a->slices = a->family == VM_WAN && sliced;
    a->videos = of_videos;
    for (size_t i = 0; i < VM_MAX_LEVELS; i++) a->temporal[i] = temporal[i] != 0;
    return 0;
}

/* Fields of AutoencoderKLFlux2 beyond AutoencoderKL's, and of pipelines' latents. */
static int get_extras(PyObject *dict, vm_arch *a) {
    const size_t levels = VM_MIN(a->levels, VM_MAX_LEVELS), channels = VM_MIN(a->latent_channels, VM_MAX_STATISTICS);
    bool decoder, mean, std, patched;
    const bool ltx = a->family == VM_LTX;
    if ((ltx && get_halves(dict, a)) ||
        (!ltx && get_list(dict, "decoder_block_out_channels", a->decoder_block_out_channels, NULL, levels, &decoder)) ||
        get_list(dict, "latents_mean", NULL, a->latents_mean, channels, &mean) ||
        get_list(dict, "latents_std", NULL, a->latents_std, channels, &std) ||
        get_list(dict, "patch_size", a->patch_size, NULL, 2, &patched))
        return -1;
    if (mean != std) {
        vm_py_refuse(PyExc_ValueError, VM_EXPECTED_IN("arch", "latents_mean, latents_std", "both or none", "one"));
        return -1;
    }
    a->statistics = mean ? channels : 0;
    return patched ? get_float(dict, "batch_norm_eps", &a->batch_norm_eps) : 0;
}

/* dict: a private copy. -1 with an exception set. */
static int read_arch(PyObject *dict, vm_arch *a) {
    PyObject *name = PyDict_GetItemString(dict, "name"), *scaling = PyDict_GetItemString(dict, "scaling_factor");
    if (name) {
        const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
        if (!text) return check_value("name", "text", name);
        snprintf(a->name, sizeof a->name, "%s", text);
        vm_end_whole(a->name);
    }
    a->scaling_known = scaling && scaling != Py_None;
    if (a->scaling_known && get_float(dict, "scaling_factor", &a->scaling_factor)) return -1;
    if (a->scaling_known && get_float(dict, "shift_factor", &a->shift_factor)) return -1;
    return get_size(dict, "in_channels", &a->in_channels) || get_size(dict, "out_channels", &a->out_channels) ||
                   get_size(dict, "latent_channels", &a->latent_channels) || get_widths(dict, a) ||
                   get_size(dict, "layers_per_block", &a->layers_per_block) ||
                   get_size(dict, "norm_num_groups", &a->norm_num_groups) ||
                   get_float(dict, "norm_eps", &a->norm_eps) || get_bool(dict, "use_quant_conv", &a->use_quant_conv) ||
                   get_bool(dict, "use_post_quant_conv", &a->use_post_quant_conv) ||
                   get_bool(dict, "mid_block_add_attention", &a->mid_block_add_attention) ||
                   get_family(dict, &a->family) || get_frames(dict, a) || get_extras(dict, a)
               ? -1
               : 0;
}

int vm_py_to_arch(PyObject *dict, void *out) {
    vm_arch *a = out;
    *a = (vm_arch){.name = "custom"};
    if (!PyDict_Check(dict)) {
        vm_py_refuse_type("arch", "a dict", dict);
        return 0;
    }
    PyObject *copy = PyDict_Copy(dict); /* a value's __float__ or a key's __eq__ may change the dict */
    const int failed = copy ? read_arch(copy, a) : -1;
    Py_XDECREF(copy);
    return !failed;
}

/* ---- backends ---- */

const vm_backend *vm_py_backend(const char *name, vm_dtype dtype, vm_precision precision) {
    const vm_backend *b;
    for (size_t i = 0; (b = vm_backend_at(dtype, precision, i)); i++) {
        if (name && *name && strcmp(name, b->name)) continue;
        if (b->usable()) return b;
        if (name && *name) {
            vm_py_refuse(PyExc_ValueError, "backend: %s is not usable on this machine (or is in VAEMEM_DISABLE)", name);
            return NULL;
        }
    }
    vm_py_refuse(PyExc_ValueError, "backend: unknown '%s'; vaemem.backends() lists them", name ? name : "");
    return NULL;
}

int vm_py_to_precision(PyObject *name, void *out) {
    vm_precision *precision = out;
    for (*precision = VM_HIGHEST; *precision <= VM_MEDIUM; (*precision)++)
        if (PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, vm_precision_name(*precision))) return 1;
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("precision", "highest, high or medium", "%R"), name);
    return 0;
}

int vm_py_to_threads(PyObject *number, void *out) {
    const long threads = PyLong_AsLong(number);
    if (PyErr_Occurred()) return 0;
    *(unsigned *)out = (unsigned)threads;
    if (threads >= 1 && threads <= VM_PY_THREADS) return 1;
    vm_py_refuse(PyExc_ValueError, VM_EXPECTED("threads", "1 to %d", "%ld"), VM_PY_THREADS, threads);
    return 0;
}

/* ---- lists of numbers ---- */

uint64_t *vm_py_to_numbers(const char *name, PyObject *sequence, size_t *count) {
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

PyObject *vm_py_numbers(const uint64_t *number, size_t count) { return tuple(count, vm_py_number_item, number); }

PyObject *vm_py_number_item(const void *numbers, size_t i) {
    return PyLong_FromUnsignedLongLong(((const uint64_t *)numbers)[i]);
}
