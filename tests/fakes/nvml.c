/* A stand-in for libnvidia-ml.so.1, with GPUs described by the text file that FAKE_NVML names.
 *
 * Power is a constant, a square wave of CLOCK_REALTIME or the work that programs announced in FAKE_NVML.work
 * (GPU, first and last time), integrated exactly in integers, so that the sample ring, the energy counter, the instant and the average power all follow from the same physics.
 * The file is read again whenever it changes: faults can be switched on while a program runs. What the
 * setters set is appended to FAKE_NVML.state with its time, so that every process sees the same GPU: l the
 * power limit (mW), c and m locked graphics and memory clocks, a application clocks (pairs of MHz, see PAIR;
 * 0: reset).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, FREQ_NOT_SUPPORTED = 24 };
enum { GPUS = 16, MIGS = 7, SETTINGS = 4096, WORKS = 4096, RING = 119 };

#define MS INT64_C(1000000)
#define RING_NS (20 * MS)
#define COUNTER_NS (100 * MS)
#define INSTANT_WINDOW_NS (25 * MS)
#define AVERAGE_WINDOW_NS (1000 * MS)
#define UTILISATION_NS (200 * MS)
/* Where the energy counter started: the same for every process. */
#define EPOCH_NS (INT64_C(1700000000) * 1000 * MS)
/* Two clocks in one setting: the lowest and highest locked ones, or memory and graphics. */
#define PAIR(first, second) ((int64_t)(first) * 1000000 + (second))
#define SECOND(pair) ((pair) % 1000000)
#define FIRST(pair) ((pair) / 1000000)

typedef __int128 wide;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef union { double d; unsigned int ui; unsigned long ul; unsigned long long ull; long long sll; } value_t;
typedef struct { unsigned long long stamp_us; value_t value; } sample_t;
typedef struct { unsigned int field, scope; long long stamp_us, latency_us; int type, status; value_t value; } field_t;
typedef struct { char legacy[16]; unsigned int domain, bus, device, device_id, subsystem_id; char bus_id[32]; } pci_t;
typedef struct { unsigned int pid; unsigned long long memory; unsigned int gi, ci; } process_t;
typedef struct { unsigned int version, sensor; int temperature; } temperature_t;

typedef struct {
    char name[96], uuid[96], bus_id[32], mig_uuids[MIGS][96];
    int architecture, mig, migs, lost, error, no_permission, set_permission, samples, counter, instant, usage;
    int processes, utilisation, temperature, clock_mhz, memory_clock_mhz, memory_mw, pcie, device_id;
    int64_t low_mw, high_mw, period_ns, on_ns, phase_ns, counter_phase_ns, counter_cost_us;
    int64_t limit_default_mw, limit_min_mw, limit_max_mw, limit_step_mw, lag_ns, smoothing_ns;
    int application_clocks, locked_clocks, set_error, set_failures, set_hang_ms, announced;
} gpu_t;

typedef struct { int gpu; char what; int64_t t_ns, value; } setting_t;
typedef struct { int gpu; int64_t from_ns, to_ns; } work_t;
typedef struct { gpu_t *parent; int number; } device_t;

static gpu_t gpus[GPUS];
static device_t devices[GPUS], instances[GPUS][MIGS];
static setting_t settings[SETTINGS];
static work_t works[WORKS];
static int gpu_count, setting_count, work_count, init_error, started, driver_load, driver_load_used;
static struct stat spec_seen, state_seen, work_seen;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Whoever loaded the library may keep its time (nvml_fake.simulated_time); 0: the machine's own. */
int64_t fake_now_ns;

static int64_t now_ns(void) {
    struct timespec t;
    if (fake_now_ns) return fake_now_ns;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000 * MS + t.tv_nsec;
}

static int64_t floor_to(int64_t t, int64_t step) { return t - t % step; }

static void put(gpu_t *g, const char *key, char *value) {
    int64_t n = atoll(value);
#define TEXT(k, field) if (!strcmp(key, k)) { snprintf(g->field, sizeof g->field, "%s", value); return; }
#define NUMBER(k) if (!strcmp(key, #k)) { g->k = n; return; }
    TEXT("name", name) TEXT("uuid", uuid) TEXT("pci_bus_id", bus_id)
    NUMBER(architecture) NUMBER(mig) NUMBER(lost) NUMBER(error) NUMBER(no_permission) NUMBER(set_permission)
    NUMBER(samples) NUMBER(counter) NUMBER(instant) NUMBER(usage) NUMBER(processes) NUMBER(utilisation)
    NUMBER(temperature) NUMBER(clock_mhz) NUMBER(memory_clock_mhz) NUMBER(memory_mw) NUMBER(pcie) NUMBER(device_id)
    NUMBER(low_mw) NUMBER(high_mw) NUMBER(period_ns) NUMBER(on_ns) NUMBER(phase_ns) NUMBER(counter_phase_ns)
    NUMBER(counter_cost_us) NUMBER(limit_default_mw) NUMBER(limit_min_mw) NUMBER(limit_max_mw) NUMBER(limit_step_mw)
    NUMBER(lag_ns) NUMBER(smoothing_ns)
    NUMBER(application_clocks) NUMBER(locked_clocks) NUMBER(set_error) NUMBER(set_failures) NUMBER(set_hang_ms)
    NUMBER(announced)
    if (!strcmp(key, "mig_uuids"))
        for (char *part = strtok(value, ","); part && g->migs < MIGS; part = strtok(NULL, ","))
            snprintf(g->mig_uuids[g->migs++], sizeof g->mig_uuids[0], "%s", part);
}

static int changed(const char *path, struct stat *seen) {
    struct stat s;
    memset(&s, 0, sizeof s);
    stat(path, &s);
    int differs = s.st_ino != seen->st_ino || s.st_size != seen->st_size ||
                  s.st_mtim.tv_sec != seen->st_mtim.tv_sec || s.st_mtim.tv_nsec != seen->st_mtim.tv_nsec;
    *seen = s;
    return differs;
}

static void state_path(char *path, size_t size) { snprintf(path, size, "%s.state", getenv("FAKE_NVML")); }

static void load(void) {
    static char spec_path[4096];
    const char *path = getenv("FAKE_NVML");
    if (!path) { gpu_count = 0; init_error = DRIVER_NOT_LOADED; spec_path[0] = 0; return; }
    if (strcmp(path, spec_path)) {
        memset(&spec_seen, 0, sizeof spec_seen);
        memset(&state_seen, 0, sizeof state_seen);
        memset(&work_seen, 0, sizeof work_seen);
        setting_count = work_count = 0;
        snprintf(spec_path, sizeof spec_path, "%s", path);
    }
    if (changed(path, &spec_seen)) {
        FILE *f = fopen(path, "r");
        char line[1024];
        gpu_t *g = NULL;
        memset(gpus, 0, sizeof gpus);
        gpu_count = init_error = 0;
        while (f && fgets(line, sizeof line, f)) {
            line[strcspn(line, "\n")] = 0;
            char *equals = strchr(line, '=');
            if (!strcmp(line, "[gpu]") && gpu_count < GPUS) g = &gpus[gpu_count++];
            else if (equals) {
                *equals = 0;
                if (g) put(g, line, equals + 1);
                else if (!strcmp(line, "init_error")) init_error = atoi(equals + 1);
                else if (!strcmp(line, "driver_load")) driver_load = atoi(equals + 1);
            }
        }
        if (f) fclose(f);
        else init_error = DRIVER_NOT_LOADED;
    }
    char state[4200];
    state_path(state, sizeof state);
    if (changed(state, &state_seen)) {
        FILE *f = fopen(state, "r");
        long long t, value;
        setting_t *s = settings;
        while (f && s < settings + SETTINGS && fscanf(f, "%d %c %lld %lld", &s->gpu, &s->what, &t, &value) == 4) {
            s->t_ns = t; s->value = value; s++;
        }
        setting_count = s - settings;
        if (f) fclose(f);
    }
    snprintf(state, sizeof state, "%s.work", path);
    if (changed(state, &work_seen)) {
        FILE *f = fopen(state, "r");
        long long from, to;
        work_t *w = works;
        while (f && w < works + WORKS && fscanf(f, "%d %lld %lld", &w->gpu, &from, &to) == 3) {
            w->from_ns = from; w->to_ns = to; w++;
        }
        work_count = w - works;
        if (f) fclose(f);
    }
}

/* The value set last at or before t, or `fallback`. */
static int64_t setting_at(int gpu, char what, int64_t t, int64_t fallback) {
    for (int i = setting_count - 1; i >= 0; i--)
        if (settings[i].gpu == gpu && settings[i].what == what && settings[i].t_ns <= t)
            return settings[i].value ? settings[i].value : fallback;
    return fallback;
}

static int64_t worked_before(const gpu_t *g, int64_t t) {
    int64_t sum = 0;
    for (work_t *w = works; w < works + work_count; w++)
        if (w->gpu == g - gpus && w->from_ns < t) sum += (w->to_ns < t ? w->to_ns : t) - w->from_ns;
    return sum;
}

static int64_t on_before(const gpu_t *g, int64_t t) {
    if (g->announced) return worked_before(g, t);
    if (g->period_ns <= 0) return t;
    t -= g->phase_ns;
    int64_t rest = t % g->period_ns;
    return t / g->period_ns * g->on_ns + (rest < g->on_ns ? rest : g->on_ns);
}

static int64_t default_pair(const gpu_t *g) { return PAIR(g->memory_clock_mhz, g->clock_mhz); }

/* Locked clocks supersede application clocks. */
static int64_t graphics_clock_at(const gpu_t *g, int64_t t) {
    int64_t application = SECOND(setting_at(g - gpus, 'a', t, default_pair(g)));
    return SECOND(setting_at(g - gpus, 'c', t, application));
}
static int64_t memory_clock_at(const gpu_t *g, int64_t t) {
    int64_t application = FIRST(setting_at(g - gpus, 'a', t, default_pair(g)));
    return SECOND(setting_at(g - gpus, 'm', t, application));
}

/* pJ (mW × ns) over a stretch of time in which no setting changes. A locked clock scales the part of the
 * power above low_mw; the limit clips the rest. */
static wide plain_energy(const gpu_t *g, int64_t from, int64_t to) {
    int n = g - gpus;
    int64_t clock = graphics_clock_at(g, from);
    int64_t limit = setting_at(n, 'l', from, g->limit_default_mw);
    int64_t high = g->low_mw + (g->high_mw - g->low_mw) * clock / (g->clock_mhz ? g->clock_mhz : 1);
    int64_t low = g->low_mw < limit ? g->low_mw : limit;
    high = high < limit ? high : limit;
    int64_t on = on_before(g, to) - on_before(g, from);
    return (wide)high * on + (wide)low * (to - from - on);
}

static wide energy_pj(const gpu_t *g, int64_t from, int64_t to) {
    wide sum = 0;
    for (int i = 0; i < setting_count; i++)
        if (settings[i].gpu == g - gpus && settings[i].t_ns > from && settings[i].t_ns < to) {
            sum += plain_energy(g, from, settings[i].t_ns);
            from = settings[i].t_ns;
        }
    return sum + plain_energy(g, from, to);
}

static unsigned int mean_mw(const gpu_t *g, int64_t end, int64_t window) {
    return (energy_pj(g, end - window, end) + window / 2) / window;
}

/* A low-pass of first order, and late: the means of short slices, each with a part of what the one after it has. */
static unsigned int smoothed_mw(const gpu_t *g, int64_t end) {
    int64_t slice = g->smoothing_ns / 128;
    double sum = 0, weight = 1, weights = 0;
    end -= g->lag_ns;
    for (int i = 0; i < 128 * 12; i++, end -= slice, weight -= weight / 128) {
        sum += weight * mean_mw(g, end, slice);
        weights += weight;
    }
    return sum / weights + 0.5;
}

static unsigned int utilisation_at(const gpu_t *g, int64_t end) {
    if (g->utilisation >= 0) return g->utilisation;
    int64_t on = on_before(g, end) - on_before(g, end - UTILISATION_NS);
    return (on * 100 + UTILISATION_NS / 2) / UTILISATION_NS;
}

static int physical(const void *device, gpu_t **g) {
    const device_t *d = device;
    if (!started || driver_load != driver_load_used) return UNINITIALIZED;
    if (!d) return INVALID;
    if (d->number >= 0) return NOT_SUPPORTED;
    *g = d->parent;
    if (*g >= gpus + gpu_count) return INVALID;
    if ((*g)->lost) return GPU_IS_LOST;
    if ((*g)->error) return (*g)->error;
    return OK;
}

/* Every call starts by looking at the file again. */
#define LOCKED(...) { pthread_mutex_lock(&lock); load(); int status = OK; __VA_ARGS__; pthread_mutex_unlock(&lock); return status; }
#define ON_GPU(...) LOCKED(gpu_t *g = NULL; status = physical(device, &g); \
    if (!status && g->no_permission) status = NO_PERMISSION; if (!status) { __VA_ARGS__; })

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    LOCKED(if (init_error) status = init_error; else {
        if (!started) driver_load_used = driver_load;
        started++;
        for (int i = 0; i < GPUS; i++) {
            devices[i] = (device_t){&gpus[i], -1};
            for (int j = 0; j < MIGS; j++) instances[i][j] = (device_t){&gpus[i], j};
        }
    })
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) LOCKED(if (started > 0) started--; else status = UNINITIALIZED)

const char *nvmlErrorString(int status) {
    static _Thread_local char buffer[40];
    snprintf(buffer, sizeof buffer, "error %d of the fake NVML", status);
    return buffer;
}

int nvmlSystemGetDriverVersion(char *s, unsigned int n) { snprintf(s, n, "580.00.fake"); return OK; }
int nvmlSystemGetNVMLVersion(char *s, unsigned int n) { snprintf(s, n, "13.580.00.fake"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *v) { *v = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned int *n) LOCKED(if (started) *n = gpu_count; else status = UNINITIALIZED)

int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **device)
    LOCKED(if (!started) status = UNINITIALIZED; else if (i >= (unsigned)gpu_count) status = INVALID;
           else if (gpus[i].lost) status = GPU_IS_LOST; else if (gpus[i].no_permission) status = NO_PERMISSION;
           else *device = &devices[i])

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) LOCKED(status = NOT_FOUND;
    for (int i = 0; i < gpu_count; i++) {
        if (!strcmp(uuid, gpus[i].uuid)) { *device = &devices[i]; status = OK; }
        for (int j = 0; j < gpus[i].migs; j++)
            if (gpus[i].mig && !strcmp(uuid, gpus[i].mig_uuids[j])) { *device = &instances[i][j]; status = OK; }
    })

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device) LOCKED(status = NOT_FOUND;
    for (int i = 0; i < gpu_count; i++)
        if (!strcasecmp(bus_id, gpus[i].bus_id)) { *device = &devices[i]; status = OK; })

int nvmlDeviceGetIndex(void *device, unsigned int *i) ON_GPU(*i = g - gpus)
int nvmlDeviceGetMinorNumber(void *device, unsigned int *i) ON_GPU(*i = g - gpus)
int nvmlDeviceGetName(void *device, char *s, unsigned int n) ON_GPU(snprintf(s, n, "%s", g->name))
int nvmlDeviceGetUUID(void *device, char *s, unsigned int n) {
    device_t *d = device;
    if (d->number >= 0) LOCKED(snprintf(s, n, "%s", d->parent->mig_uuids[d->number]))
    ON_GPU(snprintf(s, n, "%s", g->uuid))
}
int nvmlDeviceGetPciInfo_v3(void *device, pci_t *p) ON_GPU(memset(p, 0, sizeof *p);
    snprintf(p->bus_id, sizeof p->bus_id, "%s", g->bus_id);
    snprintf(p->legacy, sizeof p->legacy, "%.15s", strlen(g->bus_id) > 4 ? g->bus_id + 4 : "");
    sscanf(g->bus_id, "%x:%x:%x", &p->domain, &p->bus, &p->device);
    p->device_id = (unsigned)g->device_id << 16 | 0x10de)
int nvmlDeviceGetArchitecture(void *device, unsigned int *a) ON_GPU(*a = g->architecture)
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *m)
    ON_GPU(m[0] = 80ULL << 30; m[1] = 79ULL << 30; m[2] = 1ULL << 30)
int nvmlDeviceGetPersistenceMode(void *device, unsigned int *m) ON_GPU((void)g; *m = 1)

int nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending)
    ON_GPU(if (g->architecture < 7) status = NOT_SUPPORTED; *current = *pending = g->mig)
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned int *n) ON_GPU(*n = g->architecture < 7 ? 0 : MIGS)
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned int i, void **instance)
    ON_GPU(if (!g->mig || i >= (unsigned)g->migs) status = NOT_FOUND; else *instance = &instances[g - gpus][i])
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *instance, void **device) {
    device_t *d = instance;
    if (d->number < 0) return INVALID;
    *device = &devices[d->parent - gpus];
    return OK;
}
int nvmlDeviceIsMigDeviceHandle(void *device, unsigned int *is) { *is = ((device_t *)device)->number >= 0; return OK; }

int nvmlDeviceGetSamples(void *device, int kind, unsigned long long since_us, int *type, unsigned int *count,
                         sample_t *out) ON_GPU(
    int64_t step = kind == 0 ? RING_NS : UTILISATION_NS;
    int64_t last = floor_to(now_ns(), step);
    unsigned int n = 0;
    *type = 1;
    if ((kind == 0 && !g->samples) || kind > 2) status = NOT_SUPPORTED;
    else if (!out) *count = RING + 1;
    else {
        for (int i = RING - 1; i >= 0 && n < *count; i--) {
            int64_t t = last - i * step;
            if ((unsigned long long)(t / 1000) <= since_us) continue;
            out[n].stamp_us = t / 1000;
            out[n++].value.ui = kind != 0 ? utilisation_at(g, t) : g->smoothing_ns ? smoothed_mw(g, t) : mean_mw(g, t, step);
        }
        *count = n;
        if (!n) status = NOT_FOUND;
    })

static int energy_mj(void *device, unsigned long long *mj, int64_t *cost_us)
    ON_GPU(*cost_us = g->counter_cost_us; if (!g->counter) status = NOT_SUPPORTED; else {
        int64_t t = floor_to(now_ns() - g->counter_phase_ns, COUNTER_NS) + g->counter_phase_ns;
        *mj = energy_pj(g, EPOCH_NS, t) / 1000000000;
    })

/* As on an H200 the value is that of the call's beginning, and then it takes its time. */
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) {
    int64_t cost_us = 0;
    int status = energy_mj(device, mj, &cost_us);
    if (fake_now_ns) fake_now_ns += cost_us * 1000;
    else if (cost_us > 0) usleep(cost_us);
    return status;
}

static unsigned int instant_mw(const gpu_t *g) { return mean_mw(g, floor_to(now_ns(), 100 * MS), INSTANT_WINDOW_NS); }
static unsigned int average_mw(const gpu_t *g) { return mean_mw(g, floor_to(now_ns(), 100 * MS), AVERAGE_WINDOW_NS); }

int nvmlDeviceGetPowerUsage(void *device, unsigned int *mw)
    ON_GPU(if (!g->usage) status = NOT_SUPPORTED; else *mw = g->architecture >= 7 ? average_mw(g) : instant_mw(g))

int nvmlDeviceGetFieldValues(void *device, int count, field_t *fields) ON_GPU(
    for (int i = 0; i < count; i++) {
        field_t *f = &fields[i];
        f->type = 1;
        f->stamp_us = now_ns() / 1000;
        f->status = OK;
        if (f->field == 186 && f->scope == 0 && g->instant) f->value.ui = instant_mw(g);
        else if (f->field == 185 && f->scope == 2 && g->memory_mw) f->value.ui = g->memory_mw;
        else if (f->field == 185 && f->scope == 0 && g->usage) f->value.ui = average_mw(g);
        else f->status = NOT_SUPPORTED;
    })

int nvmlDeviceGetUtilizationRates(void *device, utilization_t *u)
    ON_GPU(u->gpu = utilisation_at(g, floor_to(now_ns(), UTILISATION_NS)); u->memory = u->gpu / 2)
int nvmlDeviceGetMaxClockInfo(void *device, unsigned int kind, unsigned int *mhz)
    ON_GPU(*mhz = kind == 2 ? g->memory_clock_mhz : g->clock_mhz)
int nvmlDeviceGetClockInfo(void *device, unsigned int kind, unsigned int *mhz)
    ON_GPU(*mhz = kind == 2 ? memory_clock_at(g, now_ns()) : graphics_clock_at(g, now_ns()))
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *p) ON_GPU((void)g; *p = 1)
int nvmlDeviceGetPerformanceState(void *device, unsigned int *p) ON_GPU((void)g; *p = 0)
int nvmlDeviceGetTemperature(void *device, unsigned int sensor, unsigned int *c) ON_GPU((void)sensor; *c = g->temperature)
int nvmlDeviceGetTemperatureV(void *device, temperature_t *t) ON_GPU(t->temperature = g->temperature)
int nvmlDeviceGetPcieThroughput(void *device, unsigned int counter, unsigned int *kb_s)
    ON_GPU(if (!g->pcie) status = NOT_SUPPORTED; else *kb_s = counter ? 2000000 : 1000000)

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, process_t *out) ON_GPU(
    unsigned int n = g->processes;
    if (n && (!out || *count < n)) status = INSUFFICIENT_SIZE;
    else for (unsigned int i = 0; i < n; i++) out[i] = (process_t){1000 + i, 1 << 20, 0xffffffff, 0xffffffff};
    *count = n)
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned int *count, process_t *out)
    ON_GPU((void)g; (void)out; *count = 0)

int nvmlDeviceGetPowerManagementLimit(void *device, unsigned int *mw)
    ON_GPU(*mw = setting_at(g - gpus, 'l', now_ns(), g->limit_default_mw))
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *mw)
    ON_GPU(*mw = setting_at(g - gpus, 'l', now_ns(), g->limit_default_mw))
int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned int *mw) ON_GPU(*mw = g->limit_default_mw)
int nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned int *min, unsigned int *max)
    ON_GPU(*min = g->limit_min_mw; *max = g->limit_max_mw)

/* Every setter's last step. `set_failures` first calls of a process fail with `set_error` (-1: all of them);
 * `set_hang_ms` is a driver that does not come back for so long, or until the description changes. */
static int set(gpu_t *g, char what, int64_t value) {
    char path[4200], line[128];
    if (!g->set_permission) return NO_PERMISSION;
    struct stat seen = spec_seen;
    for (int ms = 0; ms < g->set_hang_ms && !changed(getenv("FAKE_NVML"), &seen); ms += 5) usleep(5000);
    if (g->set_failures) {
        if (g->set_failures > 0) g->set_failures--;
        return g->set_error;
    }
    state_path(path, sizeof path);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0666);
    int n = snprintf(line, sizeof line, "%d %c %lld %lld\n", (int)(g - gpus), what, (long long)now_ns(), (long long)value);
    int written = fd >= 0 ? write(fd, line, n) : -1;
    if (fd >= 0) close(fd);
    return written == n ? OK : 999;
}

enum { GRAPHICS_CLOCKS = 8, MEMORY_CLOCKS = 2 };
static unsigned int graphics_clock(const gpu_t *g, int i) { return g->clock_mhz * (GRAPHICS_CLOCKS - i) / GRAPHICS_CLOCKS; }
static unsigned int memory_clock(const gpu_t *g, int i) { return g->memory_clock_mhz / (i + 1); }

/* The lower memory clock goes with the lower half of the graphics clocks only, as on real boards. */
static int first_graphics_clock(const gpu_t *g, unsigned int memory) {
    if (memory == memory_clock(g, 0)) return 0;
    return memory == memory_clock(g, 1) ? GRAPHICS_CLOCKS / 2 : -1;
}

int nvmlDeviceSetPowerManagementLimit(void *device, unsigned int mw)
    ON_GPU(if (g->limit_step_mw) mw = floor_to(mw, g->limit_step_mw);
           status = mw < g->limit_min_mw || mw > g->limit_max_mw ? INVALID : set(g, 'l', mw))
int nvmlDeviceSetGpuLockedClocks(void *device, unsigned int min, unsigned int max)
    ON_GPU(status = !g->locked_clocks ? NOT_SUPPORTED : min > max || (int)max > g->clock_mhz ? INVALID : set(g, 'c', PAIR(min, max)))
int nvmlDeviceResetGpuLockedClocks(void *device) ON_GPU(status = g->locked_clocks ? set(g, 'c', 0) : NOT_SUPPORTED)
int nvmlDeviceSetMemoryLockedClocks(void *device, unsigned int min, unsigned int max)
    ON_GPU(status = !g->locked_clocks ? NOT_SUPPORTED : min > max || (int)max > g->memory_clock_mhz ? INVALID : set(g, 'm', PAIR(min, max)))
int nvmlDeviceResetMemoryLockedClocks(void *device) ON_GPU(status = g->locked_clocks ? set(g, 'm', 0) : NOT_SUPPORTED)

int nvmlDeviceGetSupportedMemoryClocks(void *device, unsigned int *count, unsigned int *mhz)
    ON_GPU(if (!mhz || *count < MEMORY_CLOCKS) status = INSUFFICIENT_SIZE;
           else for (int i = 0; i < MEMORY_CLOCKS; i++) mhz[i] = memory_clock(g, i);
           *count = MEMORY_CLOCKS)
int nvmlDeviceGetSupportedGraphicsClocks(void *device, unsigned int memory, unsigned int *count, unsigned int *mhz)
    ON_GPU(int first = first_graphics_clock(g, memory); unsigned int n = GRAPHICS_CLOCKS - first;
           if (first < 0) status = NOT_FOUND;
           else {
               if (!mhz || *count < n) status = INSUFFICIENT_SIZE;
               else for (unsigned int i = 0; i < n; i++) mhz[i] = graphics_clock(g, first + i);
               *count = n;
           })

int nvmlDeviceGetApplicationsClock(void *device, unsigned int kind, unsigned int *mhz)
    ON_GPU(int64_t pair = setting_at(g - gpus, 'a', now_ns(), default_pair(g));
           if (!g->application_clocks) status = NOT_SUPPORTED; else *mhz = kind == 2 ? FIRST(pair) : SECOND(pair))
int nvmlDeviceGetDefaultApplicationsClock(void *device, unsigned int kind, unsigned int *mhz)
    ON_GPU(if (!g->application_clocks) status = NOT_SUPPORTED;
           else *mhz = kind == 2 ? FIRST(default_pair(g)) : SECOND(default_pair(g)))
int nvmlDeviceSetApplicationsClocks(void *device, unsigned int memory, unsigned int graphics) ON_GPU(
    int first = first_graphics_clock(g, memory); int listed = 0;
    for (int i = first; first >= 0 && i < GRAPHICS_CLOCKS; i++) listed |= graphics == graphics_clock(g, i);
    status = !g->application_clocks ? NOT_SUPPORTED : !listed ? FREQ_NOT_SUPPORTED : set(g, 'a', PAIR(memory, graphics)))
int nvmlDeviceResetApplicationsClocks(void *device)
    ON_GPU(status = g->application_clocks ? set(g, 'a', 0) : NOT_SUPPORTED)
