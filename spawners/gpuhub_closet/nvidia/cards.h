/* The simulated GPUs, read from the closet's files; see cards.c. */
#ifndef SIMULATED_CARDS_H
#define SIMULATED_CARDS_H

#include "nvml.h"

#define MAX_CARDS 32
#define MAX_PROCESSES 32
#define MAX_PARTS 7
#define MIB (1024ULL * 1024ULL)

/* One MIG device. */
struct part {
    char uuid[80], profile[32];
    unsigned long long memory_mib, memory_used_mib;
};

struct card {
    char name[96], uuid[80], fault[32];
    unsigned int index, minor, bus, power_limit_w, utilization, major, minor_capability, mig_mode;
    unsigned int link_width; /* of the PCIe link */
    unsigned int clocks_event_reasons, xid, xid_count; /* the code of the last Xid error, and how many there were */
    unsigned long long memory_mib, memory_used_mib;
    unsigned int processes;
    nvmlProcessInfo_t process[MAX_PROCESSES];
    struct part part[MAX_PARTS]; /* entries without a UUID do not exist */
    int is_part;                 /* the fields above are those of a part */
};

/* Writes the path of a card's file `live` into `path`; returns 0 when it is too long. */
int live_path(unsigned int slot, char *path, unsigned long length);

/* Reads the card at a position; returns 0 when there is none. */
int read_card(unsigned int slot, struct card *card);

/* The driver's answer for the card; a card that hangs answers when its fault has ended. */
nvmlReturn_t fault_of(unsigned int slot, struct card *card);

/* Replaces a card by one of its parts; returns 0 when there is no such part. */
int take_part(struct card *card, unsigned int slot);

#endif
