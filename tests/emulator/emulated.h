/* The stand-in driver's one device: memory, streams, events and graphs.
 *
 * Streams are lazy: work runs when something waits for it, and no sooner, so that a host that forgets to wait reads
 * old data. A query lets its stream take one step, so that polling comes to an end. */
#ifndef VM_EMULATED_H
#define VM_EMULATED_H

#include <cuda.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "block.h"

typedef std::function<CUresult()> work;

/* A graph: work in the order of its capture. Forks into other streams are not captured. */
struct CUgraph_st {
    std::vector<std::shared_ptr<work>> nodes;
    CUstreamCaptureMode mode;
    std::thread::id by;
    bool invalidated = false;
};
struct CUgraphExec_st {
    std::vector<std::shared_ptr<work>> nodes;
    long long bytes;
};

struct CUstream_st {
    bool blocking; /* waits for the NULL stream, which waits for it */
    std::deque<std::shared_ptr<work>> queue;
    CUgraph capture = nullptr;
};

/* A place in a stream. */
struct mark {
    CUstream on;
    bool done = false, captured = false;
    double ms = 0; /* when */
};
struct CUevent_st {
    bool timing;
    std::shared_ptr<mark> last; /* NULL: never recorded, which counts as done */
};

struct CUfunc_st {
    const vm_entry *entry;
    size_t shared_most = 48 << 10;
};
struct CUmod_st {
    std::map<std::string, CUfunc_st> functions;
    long long bytes;
};
struct CUctx_st {
    int users = 0;
};

struct block_of_memory {
    size_t bytes, counted;
    bool host;
};
enum { MEMORY_ALIGN = 256 };

struct emulated_device {
    CUctx_st context;
    CUresult failed = CUDA_SUCCESS;                        /* what every call returns once the device has failed */
    size_t used = 0, peak = 0, kernels = 0, in_flight = 0; /* in_flight: work enqueued that has not run */
    std::map<uintptr_t, block_of_memory> memory;
    CUstream_st legacy{true, {}, nullptr}, per_thread{true, {}, nullptr};
    std::set<CUstream> streams;
    std::set<CUevent> events;
    std::set<CUgraph> graphs;
    std::set<CUgraphExec> execs;
    std::set<CUmodule> modules;
};
extern emulated_device gpu;
extern thread_local bool gpu_waited; /* for all work, since this thread entered its context or enqueued work */

size_t gpu_setting(const char *name, size_t otherwise); /* of the environment, as it is now */
size_t gpu_total();
size_t gpu_granularity();
int capability();      /* 90 for 9.0 */
int gpu_shared_most(); /* bytes a block, where asked for */
CUresult gpu_take(size_t bytes, bool host, void **out);
/* Waits for nothing: a fault while work is in flight, which may use it, unless this thread has waited for all work since it
 * entered the context. What another thread has enqueued after that cannot be told from work that uses the block. */
CUresult gpu_give(uintptr_t at, bool host);
/* Memory that is taken for no block, or where bytes is negative given back. */
CUresult gpu_lose_bytes(long long bytes);
bool gpu_has(uintptr_t at, size_t bytes); /* within one block of the device's memory */
void gpu_lose();                          /* everything, as when a context is reset */
/* From now on every call fails with code. */
CUresult gpu_fail(CUresult code, const char *why);

CUstream stream_of(CUstream handle); /* NULL if there is none */
CUresult stream_push(CUstream s, work w);
void stream_step(CUstream s);
void stream_drain(CUstream s);
void streams_drain();
void stream_record(CUstream s, CUevent e);
CUresult stream_wait(CUstream s, CUevent e);
/* CUDA forbids some calls while a stream is captured; such a call invalidates the capture. */
CUresult capture_forbids(CUstream s);

extern std::recursive_mutex vm_lock;
extern thread_local std::vector<CUcontext> vm_contexts; /* what this thread pushed */

enum needs { NOTHING, THE_DRIVER, A_CONTEXT };

/* One call of the API. */
struct call {
    std::lock_guard<std::recursive_mutex> held{vm_lock};
    CUresult refused = CUDA_SUCCESS; /* it cannot be done at all */
    CUresult failed = CUDA_SUCCESS;  /* injected, or from earlier */

    explicit call(needs n);
    CUresult code() const { return refused ? refused : failed; }
};

#define ENTER(NEEDS)           \
    const call entered(NEEDS); \
    if (entered.code()) return entered.code()
/* For calls that give something back: they do it even where they return an injected or earlier failure. */
#define ENTER_TO_GIVE(NEEDS)   \
    const call entered(NEEDS); \
    if (entered.refused) return entered.refused
#define LEAVE(RESULT)                \
    const CUresult result_ = RESULT; \
    return entered.failed ? entered.failed : result_
#define WANT(CONDITION, CODE) \
    if (!(CONDITION)) return CODE
#define WANT_STREAM(S, HANDLE)            \
    const CUstream S = stream_of(HANDLE); \
    WANT(S, CUDA_ERROR_INVALID_HANDLE)
#define NOT_IN_CAPTURE(S) \
    if (const CUresult forbidden = capture_forbids(S)) return forbidden

#endif
