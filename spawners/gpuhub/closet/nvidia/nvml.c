/* A simulated libnvidia-ml.so.1: it reports the cards that the practice closet's hook put into the container.
 *
 * A card is a folder with two text files of "key value" lines: `card` (what it is) and `live` (load and fault). Folders
 * are named 0, 1, 2 … below ROOT; the first missing one ends the list. Every call reads the files anew, so a changed
 * load shows at once, and there is no state to keep but the count of nvmlInit calls. */
#include "nvml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROOT "/usr/share/nvidia-simulated"
#define ROOT_VARIABLE "NVIDIA_SIMULATED_ROOT" /* elsewhere, for use outside a container */
#define MAX_CARDS 32
#define MAX_PROCESSES 32
#define MIB (1024ULL * 1024ULL)
#define DRIVER_VERSION "580.95.05"
#define CUDA_VERSION 13000
#define IDLE_MILLIWATTS 18000

#define EXPORT __attribute__((visibility("default")))

/* A handle is the address of one of these; only its position counts. */
struct nvmlDevice_st { char unused; };

struct card {
    char name[96], uuid[80], fault[32];
    unsigned int index, minor, bus, power_limit_w, utilization;
    unsigned long long memory_mib, memory_used_mib;
    unsigned int processes;
    nvmlProcessInfo_t process[MAX_PROCESSES];
};

static struct nvmlDevice_st handles[MAX_CARDS];
static int users;

static FILE *open_file(unsigned int slot, const char *name) {
    char path[512];
    const char *root = getenv(ROOT_VARIABLE);
    snprintf(path, sizeof path, "%s/%u/%s", root && *root ? root : ROOT, slot, name);
    return fopen(path, "re");
}

static void read_card_line(struct card *card, const char *line) {
    char text[96];
    unsigned int number;
    unsigned long long big;
    if (sscanf(line, "name %95[^\n]", text) == 1) strcpy(card->name, text);
    else if (sscanf(line, "uuid %79s", text) == 1) strcpy(card->uuid, text);
    else if (sscanf(line, "index %u", &number) == 1) card->index = number;
    else if (sscanf(line, "minor %u", &number) == 1) card->minor = number;
    else if (sscanf(line, "bus %u", &number) == 1) card->bus = number;
    else if (sscanf(line, "power_limit_w %u", &number) == 1) card->power_limit_w = number;
    else if (sscanf(line, "memory_mib %llu", &big) == 1) card->memory_mib = big;
}

static void read_live_line(struct card *card, const char *line) {
    char text[32];
    unsigned int number;
    unsigned long long big;
    if (sscanf(line, "utilization %u", &number) == 1) card->utilization = number > 100 ? 100 : number;
    else if (sscanf(line, "memory_used_mib %llu", &big) == 1) card->memory_used_mib = big;
    else if (sscanf(line, "fault %31s", text) == 1) strcpy(card->fault, text);
    else if (sscanf(line, "process %u %llu", &number, &big) == 2 && card->processes < MAX_PROCESSES) {
        nvmlProcessInfo_t info = {number, big * MIB, 0xFFFFFFFFu, 0xFFFFFFFFu};
        card->process[card->processes++] = info;
    }
}

/* Returns 0 when there is no such card. */
static int read_card(unsigned int slot, struct card *card) {
    char line[256];
    FILE *file = slot < MAX_CARDS ? open_file(slot, "card") : NULL;
    if (!file) return 0;
    memset(card, 0, sizeof *card);
    while (fgets(line, sizeof line, file)) read_card_line(card, line);
    fclose(file);
    file = open_file(slot, "live");
    if (file) {
        while (fgets(line, sizeof line, file)) read_live_line(card, line);
        fclose(file);
    }
    if (card->memory_used_mib > card->memory_mib) card->memory_used_mib = card->memory_mib;
    return 1;
}

static nvmlReturn_t fault_of(const struct card *card) {
    if (!strcmp(card->fault, "lost")) return NVML_ERROR_GPU_IS_LOST;
    if (!strcmp(card->fault, "fallen_off_bus")) return NVML_ERROR_UNKNOWN;
    return NVML_SUCCESS;
}

static nvmlReturn_t card_of(nvmlDevice_t device, struct card *card) {
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (device < handles || device >= handles + MAX_CARDS) return NVML_ERROR_INVALID_ARGUMENT;
    if (!read_card((unsigned int)(device - handles), card)) return NVML_ERROR_INVALID_ARGUMENT;
    return fault_of(card);
}

static nvmlReturn_t put_text(char *target, unsigned int length, const char *text) {
    if (!target) return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(target, text);
    return NVML_SUCCESS;
}

/* The body of a call that reads one card into `card` and answers with one expression. */
#define WITH_CARD(argument, statement)                          \
    struct card card;                                           \
    nvmlReturn_t result = card_of(device, &card);               \
    if (result != NVML_SUCCESS) return result;                  \
    if (!(argument)) return NVML_ERROR_INVALID_ARGUMENT;        \
    statement;                                                  \
    return NVML_SUCCESS

/* ---- the library itself ---- */

EXPORT nvmlReturn_t nvmlInit_v2(void) {
    struct card card;
    for (unsigned int slot = 0; read_card(slot, &card); slot++)
        if (!strcmp(card.fault, "driver_mismatch")) return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    users++;
    return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { (void)flags; return nvmlInit_v2(); }
EXPORT nvmlReturn_t nvmlShutdown(void) {
    if (!users) return NVML_ERROR_UNINITIALIZED;
    users--;
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    return users ? put_text(version, length, DRIVER_VERSION) : NVML_ERROR_UNINITIALIZED;
}
EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    return put_text(version, length, "13." DRIVER_VERSION);
}
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    if (!version) return NVML_ERROR_INVALID_ARGUMENT;
    *version = CUDA_VERSION;
    return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* ---- finding a card ---- */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    struct card card;
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (!count) return NVML_ERROR_INVALID_ARGUMENT;
    for (*count = 0; read_card(*count, &card); ++*count) {}
    return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    struct card card;
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (!device || !read_card(index, &card)) return NVML_ERROR_INVALID_ARGUMENT;
    *device = &handles[index];
    return fault_of(&card);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    struct card card;
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (!uuid || !device) return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int slot = 0; read_card(slot, &card); slot++)
        if (!strcmp(card.uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2(slot, device);
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    WITH_CARD(index, *index = (unsigned int)(device - handles));
}

/* ---- what a card is ---- */

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    WITH_CARD(name, return put_text(name, length, card.name));
}
EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    WITH_CARD(uuid, return put_text(uuid, length, card.uuid));
}
EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    WITH_CARD(minor, *minor = card.minor);
}
EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, int *brand) { WITH_CARD(brand, *brand = 5 /* GeForce */); }
EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture) {
    WITH_CARD(architecture, *architecture = 10 /* Blackwell */);
}
EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    WITH_CARD(major && minor, (*major = 12, *minor = 0));
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    WITH_CARD(info, {
        memset(info, 0, sizeof *info);
        info->bus = card.bus;
        info->pciDeviceId = 0x2B8510DE;
        snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", card.bus & 0xFF);
        snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", card.bus & 0xFF);
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *info) {
    return nvmlDeviceGetPciInfo_v3(device, info);
}
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *info) {
    return nvmlDeviceGetPciInfo_v3(device, info);
}

/* ---- what a card does now ---- */

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    WITH_CARD(memory, {
        memory->total = card.memory_mib * MIB;
        memory->used = card.memory_used_mib * MIB;
        memory->free = memory->total - memory->used;
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    WITH_CARD(memory, {
        if (memory->version != (sizeof *memory | 2u << 24)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
        memory->total = card.memory_mib * MIB;
        memory->reserved = 0;
        memory->used = card.memory_used_mib * MIB;
        memory->free = memory->total - memory->used;
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory) {
    WITH_CARD(memory, {
        memory->bar1Total = memory->bar1Free = 256 * MIB;
        memory->bar1Used = 0;
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    WITH_CARD(rates, (rates->gpu = card.utilization, rates->memory = card.utilization / 2));
}
EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    WITH_CARD(milliwatts, *milliwatts = card.power_limit_w * 1000);
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    return nvmlDeviceGetEnforcedPowerLimit(device, milliwatts);
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    return nvmlDeviceGetEnforcedPowerLimit(device, milliwatts);
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    WITH_CARD(milliwatts,
              *milliwatts = IDLE_MILLIWATTS + (card.power_limit_w * 1000 - IDLE_MILLIWATTS) / 100 * card.utilization);
}
EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *celsius) {
    (void)sensor;
    WITH_CARD(celsius, *celsius = 32 + card.utilization * 2 / 5);
}
EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *percent) {
    WITH_CARD(percent, *percent = card.utilization * 3 / 5);
}
EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned int *mhz) {
    (void)type;
    WITH_CARD(mhz, *mhz = 210 + card.utilization * 22);
}
EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned int *mhz) {
    (void)type;
    WITH_CARD(mhz, *mhz = 2410);
}
EXPORT nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, int *state) {
    WITH_CARD(state, *state = card.utilization ? 1 : 8);
}
EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, int *mode) { WITH_CARD(mode, *mode = 1); }
EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, int *mode) { WITH_CARD(mode, *mode = 0); }
EXPORT nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, int *active) { WITH_CARD(active, *active = 0); }
EXPORT nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, int *mode) { WITH_CARD(mode, *mode = 0); }

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                            nvmlProcessInfo_t *processes) {
    WITH_CARD(count, {
        unsigned int room = processes ? *count : 0;
        *count = card.processes;
        if (room < card.processes) return NVML_ERROR_INSUFFICIENT_SIZE;
        if (card.processes) memcpy(processes, card.process, card.processes * sizeof *processes);
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                            nvmlProcessInfo_t *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}
EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                             nvmlProcessInfo_t *processes) {
    (void)processes;
    WITH_CARD(count, *count = 0);
}
EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                               nvmlProcessInfo_t *processes) {
    return nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, processes);
}

/* ---- PCI Express ---- */

EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation) {
    WITH_CARD(generation, *generation = 5);
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation) {
    WITH_CARD(generation, *generation = card.utilization ? 5 : 1);
}
EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned int *width) {
    WITH_CARD(width, *width = 16);
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *width) {
    WITH_CARD(width, *width = 16);
}
EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned int *kib_per_s) {
    (void)counter;
    WITH_CARD(kib_per_s, *kib_per_s = card.utilization * 20480);
}

/* ---- what GeForce cards lack ---- */

#define NOT_SUPPORTED(name, ...)                                                    \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, __VA_ARGS__) {                    \
        struct card card;                                                           \
        nvmlReturn_t result = card_of(device, &card);                               \
        return result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : result;          \
    }
#define UNUSED __attribute__((unused))
NOT_SUPPORTED(nvmlDeviceGetMigMode, UNUSED unsigned int *current, UNUSED unsigned int *pending)
NOT_SUPPORTED(nvmlDeviceGetMaxMigDeviceCount, UNUSED unsigned int *count)
NOT_SUPPORTED(nvmlDeviceGetEccMode, UNUSED int *current, UNUSED int *pending)
NOT_SUPPORTED(nvmlDeviceGetTotalEccErrors, UNUSED int type, UNUSED int counter, UNUSED unsigned long long *count)
NOT_SUPPORTED(nvmlDeviceGetSerial, UNUSED char *serial, UNUSED unsigned int length)
NOT_SUPPORTED(nvmlDeviceGetNvLinkVersion, UNUSED unsigned int link, UNUSED unsigned int *version)
NOT_SUPPORTED(nvmlDeviceGetNvLinkState, UNUSED unsigned int link, UNUSED int *active)

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    WITH_CARD(values, {
        for (int i = 0; i < count; i++) values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    });
}
