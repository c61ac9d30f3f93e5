/* A simulated libcuda.so.1 with the calls that move a process's GPU memory into host memory and back, and no others.
 *
 * A process uses a card if the card's file `live` has a line `process PID MIB`. Lines of this library keep the state of
 * those that are stopped: `locked PID`, and `moved PID MIB` in place of `process`. It changes the file, so it works only in
 * a container that may mount: the closet shows the card's folder read-only. */
#include "cards.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NOT_INITIALIZED = 3 };
enum { CUDA_ERROR_OPERATING_SYSTEM = 304, CUDA_ERROR_ILLEGAL_STATE = 401 };
enum state { RUNNING, LOCKED, CHECKPOINTED };

#define MAX_LINES 128

/* The lines of a card's file `live`. */
struct file {
    unsigned int slot, lines;
    char line[MAX_LINES][96];
};

static int read_file(unsigned int slot, struct file *file) {
    char path[512];
    FILE *source;
    if (!live_path(slot, path, sizeof path) || !(source = fopen(path, "re"))) return 0;
    file->slot = slot;
    for (file->lines = 0; file->lines < MAX_LINES && fgets(file->line[file->lines], sizeof file->line[0], source);)
        file->line[file->lines++][sizeof file->line[0] - 1] = 0;
    fclose(source);
    return 1;
}

/* Replaces the file as a whole, since others read it at any moment; the folder becomes writable for that. */
static int write_file(const struct file *file) {
    char path[512], fresh[520], folder[512];
    if (!live_path(file->slot, path, sizeof path)) return 0;
    snprintf(fresh, sizeof fresh, "%s.cuda", path);
    snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
    FILE *target = fopen(fresh, "we");
    if (!target && errno == EROFS && !mount(NULL, folder, NULL, MS_BIND | MS_REMOUNT, NULL)) target = fopen(fresh, "we");
    if (!target) return 0;
    for (unsigned int i = 0; i < file->lines; i++) fputs(file->line[i], target);
    return !fclose(target) && !rename(fresh, path);
}

/* The number of the line "key PID …"; -1 if there is none. `mib` becomes the number after it. */
static int find_line(const struct file *file, const char *key, int pid, unsigned long long *mib) {
    char format[48];
    int found;
    snprintf(format, sizeof format, "%s %%d %%llu", key);
    for (unsigned int i = 0; i < file->lines; i++)
        if (sscanf(file->line[i], format, &found, mib) >= 1 && found == pid) return (int)i;
    return -1;
}

/* Finds the card that a process uses, or has used; returns 0 when there is none. */
static int find_process(int pid, struct file *file, enum state *state, unsigned long long *mib) {
    for (unsigned int slot = 0; slot < MAX_CARDS; slot++) {
        if (!read_file(slot, file)) continue;
        unsigned long long ignored;
        if (find_line(file, "moved", pid, mib) >= 0) *state = CHECKPOINTED;
        else if (find_line(file, "process", pid, mib) < 0) continue;
        else *state = find_line(file, "locked", pid, &ignored) >= 0 ? LOCKED : RUNNING;
        return 1;
    }
    return 0;
}

/* Finds a process in a state; returns CUDA's result. */
static int find_in(int pid, enum state wanted, struct file *file, unsigned long long *mib) {
    enum state state;
    if (!find_process(pid, file, &state, mib)) return CUDA_ERROR_INVALID_VALUE;
    return state == wanted ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

static int finish(const struct file *file) { return write_file(file) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM; }

static void remove_line(struct file *file, int number) {
    if (number < 0) return;
    memmove(file->line[number], file->line[number + 1], (--file->lines - (unsigned int)number) * sizeof file->line[0]);
}

static void add_line(struct file *file, const char *text) {
    if (file->lines < MAX_LINES) snprintf(file->line[file->lines++], sizeof file->line[0], "%s", text);
}

/* Replaces "from PID MIB" by "to PID MIB", and adds `change` to the memory in use. */
static void move_process(struct file *file, int pid, const char *from, const char *to, unsigned long long mib, int sign) {
    char text[96];
    unsigned long long used = 0;
    remove_line(file, find_line(file, from, pid, &mib));
    snprintf(text, sizeof text, "%s %d %llu\n", to, pid, mib);
    add_line(file, text);
    for (unsigned int i = 0; i < file->lines; i++)
        if (sscanf(file->line[i], "memory_used_mib %llu", &used) == 1) {
            used = sign > 0 ? used + mib : used > mib ? used - mib : 0;
            snprintf(file->line[i], sizeof file->line[0], "memory_used_mib %llu\n", used);
        }
}

EXPORT int cuInit(unsigned int flags) { (void)flags; return CUDA_SUCCESS; }
EXPORT int cuDeviceGetCount(int *count) { (void)count; return CUDA_ERROR_NOT_INITIALIZED; }

EXPORT int cuGetErrorName(int error, const char **name) {
    switch (error) {
    case CUDA_SUCCESS: *name = "CUDA_SUCCESS"; return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return CUDA_SUCCESS;
    case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return CUDA_SUCCESS;
    case CUDA_ERROR_OPERATING_SYSTEM: *name = "CUDA_ERROR_OPERATING_SYSTEM"; return CUDA_SUCCESS;
    case CUDA_ERROR_ILLEGAL_STATE: *name = "CUDA_ERROR_ILLEGAL_STATE"; return CUDA_SUCCESS;
    default: *name = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT int cuCheckpointProcessGetState(int pid, int *state) {
    struct file file;
    enum state found;
    unsigned long long mib;
    if (!find_process(pid, &file, &found, &mib)) return CUDA_ERROR_INVALID_VALUE;
    *state = (int)found;
    return CUDA_SUCCESS;
}

EXPORT int cuCheckpointProcessLock(int pid, void *arguments) {
    struct file file;
    unsigned long long mib;
    char text[48];
    (void)arguments;
    int result = find_in(pid, RUNNING, &file, &mib);
    if (result != CUDA_SUCCESS) return result;
    snprintf(text, sizeof text, "locked %d\n", pid);
    add_line(&file, text);
    return finish(&file);
}

EXPORT int cuCheckpointProcessCheckpoint(int pid, void *arguments) {
    struct file file;
    unsigned long long mib;
    (void)arguments;
    int result = find_in(pid, LOCKED, &file, &mib);
    if (result != CUDA_SUCCESS) return result;
    move_process(&file, pid, "process", "moved", mib, -1);
    return finish(&file);
}

EXPORT int cuCheckpointProcessRestore(int pid, void *arguments) {
    struct file file;
    struct card card;
    unsigned long long mib;
    (void)arguments;
    int result = find_in(pid, CHECKPOINTED, &file, &mib);
    if (result != CUDA_SUCCESS) return result;
    if (!read_card(file.slot, &card) || card.memory_used_mib + mib > card.memory_mib) return CUDA_ERROR_OUT_OF_MEMORY;
    move_process(&file, pid, "moved", "process", mib, 1);
    return finish(&file);
}

EXPORT int cuCheckpointProcessUnlock(int pid, void *arguments) {
    struct file file;
    unsigned long long mib;
    (void)arguments;
    int result = find_in(pid, LOCKED, &file, &mib);
    if (result != CUDA_SUCCESS) return result;
    remove_line(&file, find_line(&file, "locked", pid, &mib));
    return finish(&file);
}
