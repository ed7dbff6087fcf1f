/* Maps of tensors, and the copies of their boxes to shared memory. */
#include "block.h"
#include "cuda.h"
#include "cuda_on_cpu.h"

namespace {
struct map_of {
    const char *first;
    uint64_t dims[3], strides[2];
    uint32_t box[3], written;
};
enum { WRITTEN = 0x70616d, LINE = 128, MOST_ROWS = 256 };
static_assert(sizeof(map_of) <= sizeof(vm_tensor_map), "one fits in the other");

/* Zeros outside the tensor. Vector v of row r of the box lies at v ^ (r & 7) if the box lies at a multiple of 1024. */
void copy_box(const map_of &m, char *shared, size_t at, const uint32_t (&from)[3]) {
    for (uint32_t r = 0; r < m.box[1] * m.box[2]; r++) {
        const uint64_t part = from[1] + r % m.box[1], row = from[2] + r / m.box[1];
        const uint64_t left = part < m.dims[1] && row < m.dims[2] && from[0] < m.dims[0] ? m.dims[0] - from[0] : 0;
        char line[LINE] = {};
        if (left)
            memcpy(line, m.first + part * m.strides[0] + row * m.strides[1] + from[0] * 2, min<size_t>(left * 2, LINE));
        for (size_t v = 0; v < LINE; v += 16) {
            const size_t byte = at + r * LINE + v;
            memcpy(shared + (byte ^ (byte / LINE % 8 * 16)), line + v, 16);
        }
    }
}
}  // namespace

const char *vm_map_write(void *map, const void *first, const uint64_t *dims, const uint64_t *strides,
                         const uint32_t *box) {
    map_of m = {(const char *)first, {}, {}, {}, WRITTEN};
    for (int i = 0; i < 3; i++) {
        m.dims[i] = dims[i], m.box[i] = box[i];
        if (!dims[i] || dims[i] > 1ull << 32) return "dimensions from 1 to 2^32";
        if (!box[i] || box[i] > MOST_ROWS) return "a box of 1 to 256";
        if (i == 2) continue;
        m.strides[i] = strides[i];
        if (strides[i] % 16 || strides[i] >= 1ull << 40) return "strides of 16 bytes";
    }
    if (box[0] * 2 != LINE) return "swizzled rows of 128 bytes";
    if ((uintptr_t)first % 16) return "a tensor at a multiple of 16 bytes";
    memset(map, 0, sizeof(vm_tensor_map));
    memcpy(map, &m, sizeof m);
    return nullptr;
}

void vm_copy_box(void *shared, const vm_tensor_map *map, uint32_t column, uint32_t part, uint32_t row,
                 uint64_t *barrier, bool both) {
    map_of m;
    memcpy(&m, map, sizeof m);
    if (m.written != WRITTEN) vm_fault("a map that nobody has written");
    const uint32_t bytes = LINE * m.box[1] * m.box[2], rank = both ? vm_pair_rank() : 0;
    const size_t at = (size_t)((char *)shared - (char *)vm_dynamic_shared());
    if (at % LINE || !vm_is_shared(shared, bytes)) vm_fault("copy of a box of %u bytes to %p", bytes, shared);
    for (uint32_t i = 0; i <= both; i++) {
        const bool own = !both || i == rank;
        char *const to = (char *)(own ? vm_dynamic_shared() : vm_there(vm_dynamic_shared(), i));
        uint64_t *const counts = own ? barrier : (uint64_t *)vm_there(barrier, i);
        vm_bulk_later([=] { copy_box(m, to, at, {column, part, row}); }, bytes, counts, own && !both);
    }
}

extern "C" const char *emulator_map(void *map, const void *first, const uint64_t *dims, const uint64_t *strides,
                                    const uint32_t *box) {
    return vm_map_write(map, first, dims, strides, box);
}
