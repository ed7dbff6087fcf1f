/* A driver for the targets in C where clang has no libFuzzer: the files given are run; with --seconds, so are random
 * changes of them, each written to a file first.
 *
 *   target FILE...
 *   target --seconds N --seed S --last PATH FILE... */
#include <time.h>

#include "input.h"

enum { MOST = 4096, SEEDS = 256 };

static uint64_t state;

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static size_t change(uint8_t *data, size_t n) {
    for (uint64_t left = 1 + draw() % 8; left; left--) {
        const size_t at = draw() % (n + 1);
        if (draw() % 4 == 0 && n < MOST) {
            memmove(data + at + 1, data + at, n++ - at);
            data[at] = (uint8_t)draw();
        } else if (at < n && draw() % 8 == 0) {
            memmove(data + at, data + at + 1, --n - at);
        } else if (at < n) {
            data[at] = draw() % 2 ? (uint8_t)draw() : (uint8_t)(data[at] ^ 1 << draw() % 8);
        }
    }
    return n;
}

int main(int count, char **arg) {
    static uint8_t seeds[SEEDS][MOST], data[MOST];
    static size_t length[SEEDS];
    size_t files = 0, runs = 0;
    time_t end = 0;
    const char *last = NULL;
    for (int i = 1; i < count; i++) {
        if (!strcmp(arg[i], "--seconds") && i + 1 < count) {
            end = time(NULL) + atol(arg[++i]);
        } else if (!strcmp(arg[i], "--seed") && i + 1 < count) {
            state = strtoull(arg[++i], NULL, 10);
        } else if (!strcmp(arg[i], "--last") && i + 1 < count) {
            last = arg[++i];
        } else {
            FILE *f = fopen(arg[i], "rb");
            if (!f) return 2;
            const size_t n = fread(data, 1, MOST, f);
            fclose(f);
            LLVMFuzzerTestOneInput(data, n);
            runs++;
            if (files == SEEDS) continue;
            memcpy(seeds[files], data, n);
            length[files++] = n;
        }
    }
    while (end && time(NULL) < end) {
        const size_t from = files ? draw() % files : 0;
        memcpy(data, seeds[from], length[from]);
        const size_t n = change(data, length[from]);
        FILE *f = last ? fopen(last, "wb") : NULL;
        if (f) fwrite(data, 1, n, f), fclose(f);
        LLVMFuzzerTestOneInput(data, n);
        runs++;
    }
    printf("%zu executions\n", runs);
    return 0;
}
