/* Reads the GPUs that the practice closet's hook put into the container.
 *
 * A card is a folder with two text files of "key value" lines: `card` (its model) and `live` (load and fault). Folders
 * are named 0, 1, 2 … below ROOT; the first missing one ends the list. Files are read again each time, so a changed load
 * shows at once.
 *
 * A card with a line `mig_mode 1` is in MIG mode; its parts are the lines `mig_device SLOT UUID MIB PROFILE`. Where ROOT
 * has a file `mig_visible`, only the parts with UUIDs in its lines are visible. */
#include "cards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOT "/usr/share/nvidia-simulated"
#define ROOT_VARIABLE "NVIDIA_SIMULATED_ROOT" /* elsewhere, for use outside a container */
#define NO_PART 0xFFFFFFFFu
#define HANG_LOOK_US 100000

static const char *root_folder(void) {
    const char *root = getenv(ROOT_VARIABLE);
    return root && *root ? root : ROOT;
}

static FILE *open_file(unsigned int slot, const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%u/%s", root_folder(), slot, name);
    return fopen(path, "re");
}

int live_path(unsigned int slot, char *path, unsigned long length) {
    return (unsigned long)snprintf(path, length, "%s/%u/live", root_folder(), slot) < length;
}

static int is_visible(const char *uuid) {
    char path[512], line[96];
    int found = 0;
    snprintf(path, sizeof path, "%s/mig_visible", root_folder());
    FILE *file = fopen(path, "re");
    if (!file) return 1;
    while (!found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        found = !strcmp(line, uuid);
    }
    fclose(file);
    return found;
}

static void read_part_line(struct card *card, const char *line) {
    struct part part = {0};
    unsigned int slot;
    if (sscanf(line, "mig_device %u %79s %llu %31s", &slot, part.uuid, &part.memory_mib, part.profile) == 4 &&
        slot < MAX_PARTS && is_visible(part.uuid))
        card->part[slot] = part;
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
    else if (sscanf(line, "mig_mode %u", &number) == 1) card->mig_mode = number;
    else if (sscanf(line, "capability %u.%u", &card->major, &card->minor_capability) == 2) return;
    else read_part_line(card, line);
}

static void add_process(struct card *card, unsigned int pid, unsigned long long used_mib, unsigned int part) {
    nvmlProcessInfo_t info = {pid, used_mib * MIB, part, part};
    if (card->processes < MAX_PROCESSES) card->process[card->processes++] = info;
}

static void read_live_line(struct card *card, const char *line) {
    char text[32];
    unsigned int number, slot;
    unsigned long long big;
    if (sscanf(line, "utilization %u", &number) == 1) card->utilization = number > 100 ? 100 : number;
    else if (sscanf(line, "memory_used_mib %llu", &big) == 1) card->memory_used_mib = big;
    else if (sscanf(line, "clocks_event_reasons %u", &number) == 1) card->clocks_event_reasons = number;
    else if (sscanf(line, "link_width %u", &number) == 1) card->link_width = number;
    else if (sscanf(line, "xid %u %u", &card->xid, &card->xid_count) == 2) return;
    else if (sscanf(line, "fault %31s", text) == 1) strcpy(card->fault, text);
    else if (sscanf(line, "process %u %llu", &number, &big) == 2) add_process(card, number, big, NO_PART);
    else if (sscanf(line, "mig_process %u %u %llu", &slot, &number, &big) == 3) add_process(card, number, big, slot);
    else if (sscanf(line, "mig_memory_used_mib %u %llu", &slot, &big) == 2 && slot < MAX_PARTS)
        card->part[slot].memory_used_mib = big;
}

int read_card(unsigned int slot, struct card *card) {
    char line[256];
    FILE *file = slot < MAX_CARDS ? open_file(slot, "card") : NULL;
    if (!file) return 0;
    memset(card, 0, sizeof *card);
    card->major = 12;
    card->link_width = 16;
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

nvmlReturn_t fault_of(unsigned int slot, struct card *card) {
    while (!strcmp(card->fault, "hang")) {
        usleep(HANG_LOOK_US);
        if (!read_card(slot, card)) return NVML_ERROR_UNKNOWN;
    }
    if (!strcmp(card->fault, "lost")) return NVML_ERROR_GPU_IS_LOST;
    if (!strcmp(card->fault, "fallen_off_bus")) return NVML_ERROR_UNKNOWN;
    return NVML_SUCCESS;
}

int take_part(struct card *card, unsigned int slot) {
    const struct part part = card->part[slot];
    unsigned int kept = 0;
    char name[96];
    if (!*part.uuid) return 0;
    snprintf(name, sizeof name, "%.56s MIG %s", card->name, part.profile);
    strcpy(card->name, name);
    strcpy(card->uuid, part.uuid);
    card->memory_mib = part.memory_mib;
    card->memory_used_mib = part.memory_used_mib > part.memory_mib ? part.memory_mib : part.memory_used_mib;
    for (unsigned int i = 0; i < card->processes; i++)
        if (card->process[i].gpuInstanceId == slot) card->process[kept++] = card->process[i];
    card->processes = kept;
    card->is_part = 1;
    return 1;
}
