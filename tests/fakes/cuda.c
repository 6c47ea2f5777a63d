/* A stand-in for libcuda.so.1 that knows its devices' order and makes contexts.
 *
 * The file that FAKE_NVML names gives it as `cuda_bus_ids=` (CUDA's own order) and `pci_bus_ids=` (used
 * under CUDA_DEVICE_ORDER=PCI_BUS_ID). With CUDA_VISIBLE_DEVICES set it shows nothing: who asks for the
 * order of all devices must unset it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, DEVICES = 16 };

static char bus_ids[DEVICES][32];
static int count, started;

int cuInit(unsigned int flags) {
    const char *path = getenv("FAKE_NVML"), *order = getenv("CUDA_DEVICE_ORDER");
    const char *key = order && !strcmp(order, "PCI_BUS_ID") ? "pci_bus_ids=" : "cuda_bus_ids=";
    FILE *f = path ? fopen(path, "r") : NULL;
    char line[1024];
    if (flags) return INVALID_VALUE;
    if (getenv("CUDA_VISIBLE_DEVICES") || !f) { if (f) fclose(f); return NO_DEVICE; }
    count = 0;
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key)))
            for (char *part = strtok(line + strlen(key), ",\n"); part && count < DEVICES; part = strtok(NULL, ",\n"))
                snprintf(bus_ids[count++], sizeof bus_ids[0], "%s", part);
    fclose(f);
    started = 1;
    return count ? OK : NO_DEVICE;
}

int cuDeviceGetCount(int *n) { *n = count; return started ? OK : NOT_INITIALIZED; }

int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= count) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

int cuDeviceGetPCIBusId(char *text, int size, int device) {
    if (device < 0 || device >= count) return INVALID_DEVICE;
    snprintf(text, size, "%s", bus_ids[device]);
    return OK;
}

/* Each context made is a line "pid device" in $FAKE_NVML.contexts, so that a test can see who held one. */
int cuDevicePrimaryCtxRetain(void **context, int device) {
    const char *path = getenv("FAKE_NVML");
    char name[1024];
    if (!started) return NOT_INITIALIZED;
    if (device < 0 || device >= count) return INVALID_DEVICE;
    snprintf(name, sizeof name, "%s.contexts", path);
    FILE *f = fopen(name, "a");
    if (!f) return INVALID_VALUE;
    fprintf(f, "%d %d\n", (int)getpid(), device);
    fclose(f);
    *context = bus_ids[device];
    return OK;
}
