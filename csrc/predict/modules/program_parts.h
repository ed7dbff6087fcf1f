/* A program's parts, which program_read.c makes and program.c plays. */
#ifndef VM_PROGRAM_PARTS_H
#define VM_PROGRAM_PARTS_H

#include "polynomial.h"
#include "program.h"

/* A word: + - c a b l with a number (of a size, of takes ago, of a convolution ...), or = with a module's. */
typedef struct step {
    char kind;
    uint32_t number;
    const char *name; /* of + and =: the storage's or the module's */
} step;

/* takes: of its whole call; reach: how many takes before it the farthest give refers to. */
typedef struct module {
    size_t first, steps, takes, reach, plays, depth, path;
} module;

/* A convolution or an attention. sizes: how many it has. flag: nhwc, and of a general convolution whether it has three
 * dimensions and is transposed; or is_causal, enable_gqa, whether there is a mask and of booleans, which of queries,
 * keys and values lie token by token. */
enum { NHWC, HAS_DEPTH, TRANSPOSED };
enum { OF_SQUARE = 8, OF_FRAMES = 9, OF_ATTENTION = 9, OF_GENERAL = 22 };
typedef struct question {
    int dtype; /* -1: the call's own */
    size_t sizes;
    uint32_t size[OF_GENERAL];
    bool flag[7];
} question;

/* A range of a list: its first item and their number. */
typedef struct span {
    size_t first, count;
} span;

enum { SIZES, CONVS, ATTENTIONS, MODULES, LISTS };

typedef struct recorded {
    unsigned dtypes;   /* one bit each */
    const char *cases; /* "1 n = 1; 1 h != 2 h1" */
    span own[LISTS];
} recorded;

typedef struct derived {
    const char *polynomial;
    int64_t by, to;
} derived;

struct vm_program {
    char *text; /* lines end with 0 */
    size_t given, names, calls, steps, count[LISTS];
    const char *title, *name[VM_PROGRAM_NAMES];
    derived follows[VM_PROGRAM_NAMES];
    recorded *call;
    step *step;
    const char **size;
    question *question[LISTS]; /* of CONVS and ATTENTIONS */
    module *module;
};

#endif
