/* libcudart and libcuda for processes on a host without a GPU: as much of both as ftd/cuda/runtime.py calls.

   Device memory is a file in $FAKE_CUDART_MEMORY, mapped shared, and an IPC handle is that file's name. Streams do
   their work at once, which is an order that CUDA allows. What is said here to fail:

   $FAKE_CUDART is a directory of the processes of one role. Its file `control`, read again at every call, has a line
   for each of
       devices N                 GPUs of the host [1]
       lost CODE                 every call fails, for as long as the line is there
       fail NAME NTH CODE        the NTH call of that name in a process fails; 0 is every one; -1 never returns
       sticky NAME NTH CODE      from that call on its process is lost for good, as by an error of its context
       register_max BYTES        a longer registration fails
       register_total BYTES      a registration that makes more than this in a process fails
       read_only 0               the GPU cannot register what may not be written
       register_ms_per_mib X     registrations take so long
       copy_ms_per_mib X         copies take so long
   and its file `calls` gets a line of each process for what tests look at: "PID WHAT …". */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

/* driver_types.h */
enum { NEVER = -1, SUCCESS, INVALID_VALUE, MEMORY_ALLOCATION, NO_DEVICE = 100, INVALID_DEVICE, INVALID_CONTEXT = 201,
       ALREADY_REGISTERED = 712, NOT_REGISTERED, NOT_SUPPORTED = 801 };
enum { FLAG_READ_ONLY = 8, ATTRIBUTE_READ_ONLY = 113, TABLE = 4096, GPUS = 16 };
typedef struct { char name[64]; } Handle; /* cudaIpcMemHandle_t */

typedef struct { uintptr_t start; size_t bytes; int count, fd; char name[64]; } Range;
static Range registered[TABLE], allocated[TABLE], opened[TABLE];
static struct { char name[40]; int count; } called[64];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of all that is static */
static int dead, contexts, allocations;
static __thread int last_error, device;

/* --- what the test says, and what it is told ---------------------------------------------------------------------- */

static FILE *file_in(const char *variable, const char *name, const char *how) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv(variable) ? getenv(variable) : "/nowhere", name);
    return fopen(path, how);
}

static void note(const char *format, ...) {
    FILE *file = file_in("FAKE_CUDART", "calls", "a"); /* closed at once: lines of several processes stay whole */
    if (!file) return;
    va_list rest;
    va_start(rest, format);
    fprintf(file, "%d ", (int)getpid());
    vfprintf(file, format, rest);
    fputc('\n', file);
    va_end(rest);
    fclose(file);
}

static double setting(const char *key, double otherwise) {
    char line[256], name[64];
    double value = otherwise, found;
    FILE *file = file_in("FAKE_CUDART", "control", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %lf", name, &found) == 2 && !strcmp(name, key)) value = found;
    if (file) fclose(file);
    return value;
}

/* The error that the nth call of `name` is to give. */
static int injected(const char *name, int nth) {
    char line[256], what[16], whose[64];
    int number, code, result = SUCCESS;
    FILE *file = file_in("FAKE_CUDART", "control", "r");
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%15s %63s %d %d", what, whose, &number, &code) != 4 || strcmp(whose, name)) continue;
        if (!strcmp(what, "fail") && (number == 0 || number == nth)) result = code;
        if (!strcmp(what, "sticky") && nth >= number) result = dead = code;
    }
    if (file) fclose(file);
    return result;
}

static int leave_driver(int code) { /* calls of the driver leave no last error */
    pthread_mutex_unlock(&mutex);
    return code;
}

static int leave(int code) {
    if (code) last_error = code;
    return leave_driver(code);
}

/* Begins every call: takes the mutex, and gives the error that it is to fail with. */
static int enter(const char *name) {
    pthread_mutex_lock(&mutex);
    int at = 0;
    while (called[at].name[0] && strcmp(called[at].name, name)) at++;
    snprintf(called[at].name, sizeof called[at].name, "%s", name);
    called[at].count++;
    if (dead) return dead;
    if (last_error) note("PENDING error %d at %s", last_error, name); /* somebody did not clear it */
    int lost = (int)setting("lost", 0), code = lost ? lost : injected(name, called[at].count);
    if (code == NEVER) for (leave_driver(code);;) pause();
    return code;
}

static void take(const char *key, size_t bytes) {
    usleep((useconds_t)(setting(key, 0) * bytes / (1 << 20) * 1000));
}

/* --- devices ------------------------------------------------------------------------------------------------------ */

/* UUIDs: GPU i is all bytes 0x10+i, and slice i of a partitioned GPU all 0xa0+i. */
static void name_of(int gpu, unsigned char *uuid) { memset(uuid, gpu < 100 ? 0x10 + gpu : 0xa0 + gpu - 100, 16); }

/* The GPU that an entry of CUDA_VISIBLE_DEVICES names; -1 for none. */
static int named(const char *entry, int devices) {
    char text[64], *end;
    for (int gpu = 0; gpu < 100 + GPUS; gpu++) {
        unsigned char b[16];
        if (gpu == devices) gpu = 100;
        name_of(gpu, b);
        snprintf(text, sizeof text, "%2$s-%1$x%1$x%1$x%1$x-%1$x%1$x-%1$x%1$x-%1$x%1$x-%1$x%1$x%1$x%1$x%1$x%1$x", b[0],
                 gpu < 100 ? "GPU" : "MIG");
        if (!strcmp(text, entry)) return gpu;
    }
    long number = strtol(entry, &end, 10);
    return *entry && !*end && number >= 0 && number < devices ? (int)number : -1;
}

static int visible(int *gpus) {
    int devices = (int)setting("devices", 1), count = 0;
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    for (; !given && count < devices; count++) gpus[count] = count;
    if (!given) return count;
    char list[1024], *rest = list, *entry;
    snprintf(list, sizeof list, "%s", given);
    while (count < GPUS && (entry = strsep(&rest, ",")) && (gpus[count] = named(entry, devices)) >= 0) count++;
    return count; /* what follows an entry that names nothing is not visible */
}

/* Makes the context of the calling thread's device. */
static int context(int *gpu) {
    int gpus[GPUS];
    if (device >= visible(gpus)) return INVALID_DEVICE;
    *gpu = gpus[device];
    if (!(contexts >> device & 1)) note("context %d", device);
    contexts |= 1 << device;
    return SUCCESS;
}

static int enter_context(const char *name, int *gpu) {
    int code = enter(name);
    return code ? code : context(gpu);
}

int cudaGetDeviceCount(int *count) {
    int gpus[GPUS], code = enter("cudaGetDeviceCount");
    *count = code ? 0 : visible(gpus);
    return leave(code ? code : *count ? SUCCESS : NO_DEVICE);
}

int cudaDeviceGetAttribute(int *value, int attribute, int ordinal) {
    int gpus[GPUS], code = enter("cudaDeviceGetAttribute");
    *value = attribute == ATTRIBUTE_READ_ONLY ? (int)setting("read_only", 1) : 0;
    return leave(code ? code : ordinal < visible(gpus) ? SUCCESS : INVALID_DEVICE);
}

int cudaSetDevice(int ordinal) {
    int gpus[GPUS], gpu, code = enter("cudaSetDevice");
    if (!code && (ordinal < 0 || ordinal >= visible(gpus))) code = INVALID_DEVICE;
    if (!code) device = ordinal, code = context(&gpu);
    return leave(code);
}

int cudaMemGetInfo(size_t *unused, size_t *total) {
    int gpu;
    *unused = *total = (size_t)1 << 34;
    return leave(enter_context("cudaMemGetInfo", &gpu));
}

int cudaGetLastError(void) {
    int was = last_error ? last_error : dead;
    last_error = SUCCESS;
    return was;
}

const char *cudaGetErrorString(int code) { return code ? "the stand-in refused it" : "no error"; }

int cuDeviceGet(int *out, int ordinal) {
    int gpus[GPUS], code = enter("cuDeviceGet");
    if (!code && ordinal >= visible(gpus)) code = INVALID_DEVICE;
    if (!code) *out = gpus[ordinal];
    return leave_driver(code);
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int gpu) {
    int code = enter("cuDeviceGetUuid_v2");
    name_of(gpu, uuid);
    return leave_driver(code);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* The first range of a table that has a byte of the given ones; for no bytes, a free place. */
static Range *find(Range *table, uintptr_t start, size_t bytes) {
    for (int i = 0; i < TABLE; i++)
        if (bytes ? table[i].start < start + bytes && start < table[i].start + table[i].bytes : !table[i].bytes)
            return &table[i];
    return NULL;
}

static int holds(const Range *in, uintptr_t start, size_t bytes) {
    return in && in->start <= start && start + bytes <= in->start + in->bytes;
}

static int map(const char *name, size_t bytes, int flags, Range *range) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("FAKE_CUDART_MEMORY"), name);
    int fd = open(path, O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd < 0 || (flags && ftruncate(fd, bytes))) return INVALID_VALUE;
    flock(fd, LOCK_SH); /* tells the owner that it is open */
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    *range = (Range){(uintptr_t)memory, bytes, 1, fd, ""};
    snprintf(range->name, sizeof range->name, "%s", name);
    return SUCCESS;
}

static void unmap(Range *range) {
    munmap((void *)range->start, range->bytes);
    close(range->fd);
    *range = (Range){0};
}

int cudaMalloc(void **address, size_t bytes) {
    char name[64];
    int gpu, code = enter_context("cudaMalloc", &gpu);
    if (!code) {
        snprintf(name, sizeof name, "%d.%zu.%d.%d", gpu, bytes, (int)getpid(), allocations++);
        Range *range = find(allocated, 0, 0);
        code = map(name, bytes, O_CREAT | O_EXCL, range);
        *address = (void *)range->start;
    }
    return leave(code);
}

int cudaFree(void *address) {
    char path[4096];
    int gpu, code = enter_context("cudaFree", &gpu);
    Range *range = address ? find(allocated, (uintptr_t)address, 1) : NULL;
    if (!code && address && !range) code = INVALID_VALUE;
    if (!code && range) {
        if (flock(range->fd, LOCK_EX | LOCK_NB)) note("FREED %s while another process has it open", range->name);
        snprintf(path, sizeof path, "%s/%s", getenv("FAKE_CUDART_MEMORY"), range->name);
        unlink(path);
        unmap(range);
    }
    return leave(code);
}

int cuMemGetAddressRange_v2(uintptr_t *start, size_t *bytes, uintptr_t address) {
    int code = enter("cuMemGetAddressRange_v2");
    Range *range = find(allocated, address, 1) ? find(allocated, address, 1) : find(opened, address, 1);
    if (!code && !range) code = INVALID_VALUE;
    if (!code) *start = range->start, *bytes = range->bytes;
    return leave_driver(code);
}

int cudaIpcGetMemHandle(Handle *handle, void *address) {
    int code = enter("cudaIpcGetMemHandle");
    Range *range = find(allocated, (uintptr_t)address, 1);
    if (!code && !range) code = INVALID_VALUE;
    if (!code) memcpy(handle->name, range->name, sizeof handle->name);
    return leave(code);
}

int cudaIpcOpenMemHandle(void **address, Handle handle, unsigned flags) {
    int gpu, of = -1, owner = 0, code = enter_context("cudaIpcOpenMemHandle", &gpu);
    size_t bytes = 0;
    handle.name[sizeof handle.name - 1] = 0;
    if (!code && sscanf(handle.name, "%d.%zu.%d", &of, &bytes, &owner) != 3) code = INVALID_VALUE;
    if (!code && (of != gpu || owner == (int)getpid())) code = INVALID_CONTEXT;
    if (code) return leave(code);
    for (int i = 0; i < TABLE; i++)
        if (opened[i].bytes && !strcmp(opened[i].name, handle.name)) {
            opened[i].count++;
            *address = (void *)opened[i].start;
            return leave(SUCCESS);
        }
    Range *range = find(opened, 0, 0);
    code = map(handle.name, bytes, 0, range);
    *address = (void *)range->start;
    if (!code) note("opened %s", handle.name);
    return leave(code);
}

int cudaIpcCloseMemHandle(void *address) {
    int code = enter("cudaIpcCloseMemHandle");
    Range *range = find(opened, (uintptr_t)address, 1);
    if (!code && !range) code = INVALID_VALUE;
    if (!code && --range->count == 0) unmap(range);
    return leave(code);
}

/* Permissions of a mapping ("r--s") that holds all of the bytes, pieced together or not; "" where nothing is mapped. */
static void permissions(uintptr_t start, size_t bytes, char *found) {
    char line[4096], words[8];
    uintptr_t first, end, at = start;
    FILE *file = fopen("/proc/self/maps", "r");
    found[0] = 0;
    while (at < start + bytes && file && fgets(line, sizeof line, file))
        if (sscanf(line, "%lx-%lx %7s", &first, &end, words) == 3 && first <= at && at < end) {
            if (!found[0] || words[1] == '-') strcpy(found, words);
            at = end;
        }
    if (file) fclose(file);
    if (at < start + bytes) found[0] = 0;
}

int cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    char found[8];
    int gpu, code = enter_context("cudaHostRegister", &gpu);
    uintptr_t start = (uintptr_t)address;
    size_t total = bytes;
    for (int i = 0; i < TABLE; i++) total += registered[i].bytes;
    permissions(start, bytes, found);
    if (!code && find(registered, start, bytes)) code = ALREADY_REGISTERED;
    if (!code && bytes > setting("register_max", 1e18)) code = INVALID_VALUE;
    if (!code && total > setting("register_total", 1e18)) code = MEMORY_ALLOCATION;
    if (!code && flags & FLAG_READ_ONLY && !setting("read_only", 1)) code = NOT_SUPPORTED;
    if (!code && (!found[0] || (found[1] != 'w' && !(flags & FLAG_READ_ONLY)))) code = INVALID_VALUE;
    if (code) return note("refused %zx %zu %s %d", start, bytes, found, code), leave(code);
    *find(registered, 0, 0) = (Range){start, bytes, 1, -1, ""};
    note("register %zx %zu %s", start, bytes, found);
    leave(SUCCESS);
    if (found[1] == 'w' && found[3] == 'p') /* the driver makes its pages private: a copy of each */
        for (volatile char *at = address; at < (char *)address + bytes; at += 4096) *at = *at;
    take("register_ms_per_mib", bytes);
    return SUCCESS;
}

int cudaHostUnregister(void *address) {
    int code = enter("cudaHostUnregister");
    Range *range = find(registered, (uintptr_t)address, 1);
    if (!code && (!range || range->start != (uintptr_t)address)) code = NOT_REGISTERED;
    if (!code) {
        note("unregister %zx %zu", range->start, range->bytes);
        *range = (Range){0};
    }
    return leave(code);
}

/* --- streams and events ------------------------------------------------------------------------------------------- */

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    int gpu, code = enter_context("cudaMemcpyAsync", &gpu);
    uintptr_t dst = (uintptr_t)to, src = (uintptr_t)from;
    Range *source = find(registered, src, bytes);
    if (!code && !holds(find(allocated, dst, 1), dst, bytes) && !holds(find(opened, dst, 1), dst, bytes))
        code = INVALID_VALUE;
    if (!code && source && !holds(source, src, bytes)) code = INVALID_VALUE; /* it straddles a border */
    if (leave(code)) return code;
    take("copy_ms_per_mib", bytes);
    memcpy(to, from, bytes);
    return SUCCESS;
}

static int simple(const char *name) {
    int gpu;
    return leave(enter_context(name, &gpu));
}

#define SIMPLE(name, ...) int name(__VA_ARGS__) { return simple(#name); }
#define MADE(name) int name(void **handle, unsigned flags) { return *handle = calloc(1, 64), simple(#name); }
#define UNMADE(name) int name(void *handle) { return free(handle), simple(#name); }
MADE(cudaStreamCreateWithFlags)
MADE(cudaEventCreateWithFlags)
UNMADE(cudaStreamDestroy)
UNMADE(cudaEventDestroy)
SIMPLE(cudaStreamWaitEvent, void *stream, void *event, unsigned flags)
SIMPLE(cudaStreamSynchronize, void *stream)
SIMPLE(cudaEventRecord, void *event, void *stream)
SIMPLE(cudaEventQuery, void *event) /* its work is done: streams do theirs at once */
SIMPLE(cudaEventSynchronize, void *event)

int cudaStreamIsCapturing(void *stream, int *state) { return *state = 0, simple("cudaStreamIsCapturing"); }
