/* A simulated nvidia-smi for the simulated GPUs: `-L`, the table, and `--query-gpu=… --format=csv[,noheader][,nounits]`,
 * for all cards or those named by `-i`/`--id=` (indexes or UUIDs). Linked statically: it runs in any image. */
#include "nvml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1024ULL * 1024ULL)

struct gpu {
    unsigned int index, fan, celsius, milliwatts, limit;
    char name[96], uuid[96];
    int major, minor;
    nvmlMemory_t memory;
    nvmlUtilization_t rates;
    nvmlPciInfo_t pci;
};

static int fail(nvmlReturn_t result, unsigned int index) {
    printf("Unable to determine the device handle for GPU%u: %s\n", index, nvmlErrorString(result));
    return result > 255 ? 255 : result;
}

static nvmlReturn_t read_gpu(unsigned int index, struct gpu *gpu) {
    nvmlDevice_t device;
    nvmlReturn_t result = nvmlDeviceGetHandleByIndex_v2(index, &device);
    memset(gpu, 0, sizeof *gpu);
    gpu->index = index;
    if (!result) result = nvmlDeviceGetName(device, gpu->name, sizeof gpu->name);
    if (!result) result = nvmlDeviceGetUUID(device, gpu->uuid, sizeof gpu->uuid);
    if (!result) result = nvmlDeviceGetMemoryInfo(device, &gpu->memory);
    if (!result) result = nvmlDeviceGetUtilizationRates(device, &gpu->rates);
    if (!result) result = nvmlDeviceGetPowerUsage(device, &gpu->milliwatts);
    if (!result) result = nvmlDeviceGetEnforcedPowerLimit(device, &gpu->limit);
    if (!result) result = nvmlDeviceGetTemperature(device, 0, &gpu->celsius);
    if (!result) result = nvmlDeviceGetFanSpeed(device, &gpu->fan);
    if (!result) result = nvmlDeviceGetPciInfo_v3(device, &gpu->pci);
    if (!result) result = nvmlDeviceGetCudaComputeCapability(device, &gpu->major, &gpu->minor);
    return result;
}

/* Is this card among `wanted`, a comma list of indexes and UUIDs (all when NULL)? */
static int is_wanted(const struct gpu *gpu, const char *wanted) {
    char list[1024], index[16];
    if (!wanted) return 1;
    snprintf(list, sizeof list, "%s", wanted);
    snprintf(index, sizeof index, "%u", gpu->index);
    for (char *word = strtok(list, ","); word; word = strtok(NULL, ","))
        if (!strcmp(word, index) || !strcmp(word, gpu->uuid)) return 1;
    return 0;
}

/* The unit of a field ("" for none), or NULL for an unknown field. */
static const char *field(const struct gpu *gpu, const char *name, char *value, size_t size) {
    static char driver[80];
#define FIELD(word, unit, ...) if (!strcmp(name, word)) { snprintf(value, size, __VA_ARGS__); return unit; }
    nvmlSystemGetDriverVersion(driver, sizeof driver);
    FIELD("index", "", "%u", gpu->index)
    FIELD("name", "", "%s", gpu->name)
    FIELD("gpu_name", "", "%s", gpu->name)
    FIELD("uuid", "", "%s", gpu->uuid)
    FIELD("gpu_uuid", "", "%s", gpu->uuid)
    FIELD("pci.bus_id", "", "%s", gpu->pci.busId)
    FIELD("driver_version", "", "%s", driver)
    FIELD("compute_cap", "", "%d.%d", gpu->major, gpu->minor)
    FIELD("temperature.gpu", "", "%u", gpu->celsius)
    FIELD("memory.total", "MiB", "%llu", gpu->memory.total / MIB)
    FIELD("memory.used", "MiB", "%llu", gpu->memory.used / MIB)
    FIELD("memory.free", "MiB", "%llu", gpu->memory.free / MIB)
    FIELD("utilization.gpu", "%", "%u", gpu->rates.gpu)
    FIELD("utilization.memory", "%", "%u", gpu->rates.memory)
    FIELD("power.draw", "W", "%u.%02u", gpu->milliwatts / 1000, gpu->milliwatts % 1000 / 10)
    FIELD("power.limit", "W", "%u.%02u", gpu->limit / 1000, gpu->limit % 1000 / 10)
    return NULL;
}

/* One line of the query's table; the header when `header`. Returns 0 with a message when a field is unknown. */
static int print_line(const struct gpu *gpu, const char *fields, int header, int units) {
    char list[1024], value[128];
    const char *gap = "";
    snprintf(list, sizeof list, "%s", fields);
    for (char *word = strtok(list, ","); word; word = strtok(NULL, ","), gap = ", ") {
        const char *unit = field(gpu, word, value, sizeof value);
        int with_unit = unit && *unit && units;
        if (!unit) {
            printf("Field \"%s\" is not a valid field to query (simulated nvidia-smi).\n", word);
            return 0;
        }
        if (header) printf("%s%s%s%s%s", gap, word, with_unit ? " [" : "", with_unit ? unit : "", with_unit ? "]" : "");
        else printf("%s%s%s%s", gap, value, with_unit ? " " : "", with_unit ? unit : "");
    }
    printf("\n");
    return 1;
}

/* The lines of `-L`: the card, and below it its MIG devices, named as after ` MIG ` in their own names. */
static void print_listed(const struct gpu *gpu) {
    nvmlDevice_t device, part;
    unsigned int slots = 0;
    printf("GPU %u: %s (UUID: %s)\n", gpu->index, gpu->name, gpu->uuid);
    if (nvmlDeviceGetHandleByIndex_v2(gpu->index, &device) || nvmlDeviceGetMaxMigDeviceCount(device, &slots)) return;
    for (unsigned int slot = 0, number = 0; slot < slots; slot++) {
        char name[96], uuid[96];
        if (nvmlDeviceGetMigDeviceHandleByIndex(device, slot, &part)) continue;
        if (nvmlDeviceGetName(part, name, sizeof name) || nvmlDeviceGetUUID(part, uuid, sizeof uuid)) continue;
        printf("  MIG %-11s Device %2u: (UUID: %s)\n", strstr(name, " MIG ") + 5, number++, uuid);
    }
}

static void print_rule(void) {
    printf("+-----------------------------------------------------------------------------+\n");
}

static void print_row(const struct gpu *gpu) {
    char line[160];
    snprintf(line, sizeof line, "%3u  %-42.42s %s", gpu->index, gpu->name, gpu->pci.busId);
    printf("| %-75.75s |\n", line);
    snprintf(line, sizeof line, "fan %u%%  %uC  %uW / %uW  %lluMiB / %lluMiB  GPU-Util %u%%", gpu->fan, gpu->celsius,
             gpu->milliwatts / 1000, gpu->limit / 1000, gpu->memory.used / MIB, gpu->memory.total / MIB, gpu->rates.gpu);
    printf("|      %-70.70s |\n", line);
}

static void print_title(void) {
    char driver[80] = "", line[256];
    int cuda = 0;
    nvmlSystemGetDriverVersion(driver, sizeof driver);
    nvmlSystemGetCudaDriverVersion(&cuda);
    snprintf(line, sizeof line, "NVIDIA-SMI %s   Driver Version: %s   CUDA Version: %d.%d", driver, driver, cuda / 1000,
             cuda % 1000 / 10);
    print_rule();
    printf("| %-75.75s |\n", line);
    printf("| %-75s |\n", "*** simulated: no GPU here; programs run on the CPU ***");
    print_rule();
}

static const char *value_of(const char *argument, const char *name) {
    size_t length = strlen(name);
    return strncmp(argument, name, length) ? NULL : argument + length;
}

int main(int argc, char **argv) {
    const char *fields = NULL, *format = "csv", *wanted = NULL, *text;
    unsigned int count = 0, shown = 0;
    int list = 0, header;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "-L") || !strcmp(argv[i], "--list-gpus")) list = 1;
        else if ((text = value_of(argv[i], "--query-gpu="))) fields = text;
        else if ((text = value_of(argv[i], "--format="))) format = text;
        else if ((text = value_of(argv[i], "--id="))) wanted = text;
        else if (!strcmp(argv[i], "-i") && i + 1 < argc) wanted = argv[++i];
        else {
            printf("Invalid combination of input arguments (simulated nvidia-smi knows -L, -i, --query-gpu=, --format=).\n");
            return 2;
        }
    }
    nvmlReturn_t result = nvmlInit_v2();
    if (result) {
        printf("Failed to initialize NVML: %s\n", nvmlErrorString(result));
        return result;
    }
    nvmlDeviceGetCount_v2(&count);
    header = !strstr(format, "noheader");
    if (!list && !fields) print_title();
    for (unsigned int index = 0; index < count; index++) {
        struct gpu gpu;
        if ((result = read_gpu(index, &gpu))) return fail(result, index);
        if (!is_wanted(&gpu, wanted)) continue;
        shown++;
        if (list) print_listed(&gpu);
        else if (!fields) print_row(&gpu);
        else {
            if (header && !print_line(&gpu, fields, 1, !strstr(format, "nounits"))) return 2;
            header = 0;
            if (!print_line(&gpu, fields, 0, !strstr(format, "nounits"))) return 2;
        }
    }
    if (!list && !fields) print_rule();
    nvmlShutdown();
    if (!shown) {
        printf("No devices were found\n");
        return 6;
    }
    return 0;
}
