/* A simulated libnvidia-ml.so.1: it answers for the GPUs that cards.c reads. Every call reads them again; it keeps only
 * the count of nvmlInit calls, the energy since a process began to ask for it, and the errors that an event set has seen. */
#include "nvml.h"

#include "cards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DRIVER_VERSION "580.95.05"
#define CUDA_VERSION 13000
#define IDLE_MILLIWATTS 18000

#define EXPORT __attribute__((visibility("default")))

/* A handle is the address of one of these; only its position counts. */
struct nvmlDevice_st { char unused; };

static struct nvmlDevice_st handles[MAX_CARDS];
static struct nvmlDevice_st part_handles[MAX_CARDS * MAX_PARTS];
static int users;

static int is_part_handle(nvmlDevice_t device) {
    return device >= part_handles && device < part_handles + MAX_CARDS * MAX_PARTS;
}

/* The position of a card's handle, or of the card that a part's handle belongs to. */
static unsigned int slot_of(nvmlDevice_t device) {
    return (unsigned int)(is_part_handle(device) ? (device - part_handles) / MAX_PARTS : device - handles);
}

static nvmlReturn_t card_of(nvmlDevice_t device, struct card *card) {
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (!is_part_handle(device) && (device < handles || device >= handles + MAX_CARDS))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!read_card(slot_of(device), card)) return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = fault_of(slot_of(device), card);
    if (result == NVML_SUCCESS && is_part_handle(device) &&
        !take_part(card, (unsigned int)(device - part_handles) % MAX_PARTS))
        return NVML_ERROR_INVALID_ARGUMENT;
    return result;
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
    case NVML_ERROR_TIMEOUT: return "Timeout";
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

/* ---- search for a card ---- */

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
    return fault_of(index, &card);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    struct card card;
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (!uuid || !device) return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int slot = 0; read_card(slot, &card); slot++) {
        if (!strcmp(card.uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2(slot, device);
        for (unsigned int part = 0; part < MAX_PARTS; part++)
            if (*uuid && !strcmp(card.part[part].uuid, uuid)) {
                *device = &part_handles[slot * MAX_PARTS + part];
                return fault_of(slot, &card);
            }
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    WITH_CARD(index, *index = slot_of(device));
}

/* ---- properties of a card ---- */

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
    WITH_CARD(major && minor, (*major = (int)card.major, *minor = (int)card.minor_capability));
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

/* ---- load of a card ---- */

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
    WITH_CARD(rates, {
        if (card.is_part) return NVML_ERROR_NOT_SUPPORTED;
        rates->gpu = card.utilization;
        rates->memory = card.utilization / 2;
    });
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
static unsigned int power_of(const struct card *card) {
    return IDLE_MILLIWATTS + (card->power_limit_w * 1000 - IDLE_MILLIWATTS) / 100 * card->utilization;
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    WITH_CARD(milliwatts, *milliwatts = power_of(&card));
}
/* Counts from a process's first call on, with the power at each call. */
EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    static double energy[MAX_CARDS], asked_at[MAX_CARDS];
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    double now = (double)time.tv_sec + (double)time.tv_nsec / 1e9;
    WITH_CARD(millijoules, {
        unsigned int slot = slot_of(device);
        if (asked_at[slot] > 0) energy[slot] += power_of(&card) * (now - asked_at[slot]);
        asked_at[slot] = now;
        *millijoules = (unsigned long long)energy[slot];
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    WITH_CARD(reasons, *reasons = card.clocks_event_reasons | (card.utilization ? 0u : 1u /* idle */));
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

/* ---- events: Xid errors ---- */

#define XID_EVENT 8ULL

struct nvmlEventSet_st {
    int is_watched[MAX_CARDS];
    unsigned int seen[MAX_CARDS]; /* the errors that were there before, or were returned */
};

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (!set) return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}
EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    free(set);
    return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    WITH_CARD(types, *types = card.is_part ? 0 : XID_EVENT);
}
EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    WITH_CARD(set, {
        if (card.is_part || types & ~XID_EVENT) return NVML_ERROR_NOT_SUPPORTED;
        set->is_watched[slot_of(device)] = 1;
        set->seen[slot_of(device)] = card.xid_count;
    });
}
EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    struct card card;
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (!set || !data) return NVML_ERROR_INVALID_ARGUMENT;
    for (int is_late = 0;; is_late = 1) {
        /* Also the errors of a card that is lost: the driver reports them without it. */
        for (unsigned int slot = 0; read_card(slot, &card); slot++) {
            if (!set->is_watched[slot] || card.xid_count <= set->seen[slot]) continue;
            set->seen[slot]++;
            memset(data, 0, sizeof *data);
            data->device = &handles[slot];
            data->eventType = XID_EVENT;
            data->eventData = card.xid;
            return NVML_SUCCESS;
        }
        if (is_late || !timeout_ms) return NVML_ERROR_TIMEOUT;
        usleep(timeout_ms * 1000);
    }
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
    WITH_CARD(width, *width = card.link_width);
}
EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned int *kib_per_s) {
    (void)counter;
    WITH_CARD(kib_per_s, *kib_per_s = card.utilization * 20480);
}

/* ---- MIG: a card in parts ---- */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    WITH_CARD(current && pending, {
        if (!card.mig_mode || card.is_part) return NVML_ERROR_NOT_SUPPORTED;
        *current = *pending = 1;
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    WITH_CARD(count, {
        if (!card.mig_mode || card.is_part) return NVML_ERROR_NOT_SUPPORTED;
        *count = MAX_PARTS;
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *part) {
    WITH_CARD(part && index < MAX_PARTS && !is_part_handle(device), {
        if (!card.mig_mode) return NVML_ERROR_NOT_SUPPORTED;
        if (!*card.part[index].uuid) return NVML_ERROR_NOT_FOUND;
        *part = &part_handles[slot_of(device) * MAX_PARTS + index];
    });
}
EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_part) {
    WITH_CARD(is_part, *is_part = (unsigned int)card.is_part);
}
EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t part, nvmlDevice_t *device) {
    if (!users) return NVML_ERROR_UNINITIALIZED;
    if (!device || !is_part_handle(part)) return NVML_ERROR_INVALID_ARGUMENT;
    *device = &handles[slot_of(part)];
    return NVML_SUCCESS;
}
static nvmlReturn_t put_instance(nvmlDevice_t device, unsigned int *id) {
    WITH_CARD(id, {
        if (!card.is_part) return NVML_ERROR_NOT_SUPPORTED;
        *id = (unsigned int)(device - part_handles) % MAX_PARTS;
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
    return put_instance(device, id);
}
EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
    return put_instance(device, id);
}
EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    WITH_CARD(attributes, {
        if (!card.is_part) return NVML_ERROR_NOT_SUPPORTED;
        memset(attributes, 0, sizeof *attributes);
        attributes->memorySizeMB = card.memory_mib;
        attributes->gpuInstanceSliceCount = attributes->computeInstanceSliceCount =
            (unsigned int)strtoul(strstr(card.name, " MIG ") + 5, NULL, 10);
    });
}

/* ---- memory errors: of cards that have some, or that support MIG mode ---- */

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *count) {
    (void)counter;
    WITH_CARD(count, {
        int has_errors = !strcmp(card.fault, "ecc");
        if (!has_errors && !card.mig_mode) return NVML_ERROR_NOT_SUPPORTED;
        *count = has_errors && type == 1 /* uncorrected */ ? 1 : 0;
    });
}
EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                              unsigned int *is_pending, unsigned int *has_failed) {
    WITH_CARD(corrected && uncorrected && is_pending && has_failed, {
        *has_failed = !strcmp(card.fault, "remap_failed");
        *is_pending = !strcmp(card.fault, "remap_pending");
        *uncorrected = *has_failed || *is_pending;
        if (!*uncorrected && !card.mig_mode) return NVML_ERROR_NOT_SUPPORTED;
        *corrected = 0;
    });
}

/* ---- features that GeForce cards lack ---- */

/* 1: the chipset does not support it, as nvidia-smi's `topo -p2p r` reports of GeForce cards ("CNS"). */
EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other, int capability, int *status) {
    struct card peer;
    (void)capability;
    WITH_CARD(status, {
        result = card_of(other, &peer);
        if (result != NVML_SUCCESS) return result;
        *status = strstr(card.name, "GeForce") || strstr(peer.name, "GeForce") ? 1 : 0;
    });
}

#define NOT_SUPPORTED(name, ...)                                                    \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, __VA_ARGS__) {                    \
        struct card card;                                                           \
        nvmlReturn_t result = card_of(device, &card);                               \
        return result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : result;          \
    }
#define UNUSED __attribute__((unused))
NOT_SUPPORTED(nvmlDeviceGetEccMode, UNUSED int *current, UNUSED int *pending)
NOT_SUPPORTED(nvmlDeviceGetSerial, UNUSED char *serial, UNUSED unsigned int length)
NOT_SUPPORTED(nvmlDeviceGetNvLinkVersion, UNUSED unsigned int link, UNUSED unsigned int *version)
NOT_SUPPORTED(nvmlDeviceGetNvLinkState, UNUSED unsigned int link, UNUSED int *active)

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    WITH_CARD(values, {
        for (int i = 0; i < count; i++) values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    });
}
