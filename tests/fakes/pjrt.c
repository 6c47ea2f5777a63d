/* A plugin of XLA's that computes nothing: the functions that `calibrate/pjrt.py` calls, with the arguments
   of PJRT's C interface (xla/pjrt/c/pjrt_c_api.h, version 0.90). What it was asked goes to stdout. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD size_t struct_size; void *extension_start
typedef struct { char text[256]; } Error;
typedef struct { HEAD; Error *error; } ErrorDestroy;
typedef struct { HEAD; const Error *error; const char *message; size_t message_size; } ErrorMessage;
typedef struct { HEAD; } Nothing;
typedef struct { HEAD; void *event; } Event;
typedef struct {
  HEAD; const char *name; size_t name_size; int type;
  union { const char *text; int64_t number; float real; bool truth; }; size_t value_size;
} NamedValue;
typedef struct {
  HEAD; const NamedValue *create_options; size_t num_options;
  void *kv_get, *kv_get_arg, *kv_put, *kv_put_arg, *client, *kv_try_get, *kv_try_get_arg;
} Create;
typedef struct { HEAD; void *client; const char *platform_version; size_t platform_version_size; } Version;
typedef struct { HEAD; void *client; void *const *devices; size_t num_devices; } Devices;
typedef struct { HEAD; char *code; size_t code_size; const char *format; size_t format_size; } Program;
typedef struct {
  HEAD; void *client; const Program *program; const char *options; size_t options_size; void *executable;
} Compile;
typedef struct {
  HEAD; const int64_t *minor_to_major; size_t minor_to_major_size;
  const int64_t *tile_dims; const size_t *tile_dim_sizes; size_t num_tiles;
} Tiled;
typedef struct { HEAD; const int64_t *byte_strides; size_t num_byte_strides; } Strides;
typedef struct { HEAD; union { Tiled tiled; Strides strides; }; int type; } Layout;
typedef struct {
  HEAD; void *client; const void *data; int type; const int64_t *dims; size_t num_dims;
  const int64_t *byte_strides; size_t num_byte_strides; int semantics; void *device; void *memory;
  Layout *device_layout; void *done_with_host_buffer; void *buffer;
} FromHost;
typedef struct { HEAD; void *buffer; } Buffer;
typedef struct { HEAD; void *loaded; void *executable; } Loaded;
typedef struct { HEAD; void *executable; } Executable;
typedef struct { HEAD; void *executable; size_t num_outputs; } Outputs;
typedef struct {
  HEAD; void **send, **recv; size_t num_send, num_recv; int launch_id;
  const int64_t *kept; size_t num_kept; void *context;
  const char *call_location; size_t num_tasks; int *task_ids; int64_t *incarnation_ids;
} Options;
typedef struct {
  HEAD; void *executable; Options *options; void *const *const *argument_lists; size_t num_devices;
  size_t num_args; void **const *output_lists; void **events; void *device;
} Execute;

static int client, device, alive;
static void *const devices[] = {&device};

static Error *failed(const char *text) {
  Error *error = malloc(sizeof *error);
  snprintf(error->text, sizeof error->text, "%s", text);
  return error;
}

/* As the plugin does: what is smaller than it expects is refused. */
#define CHECKED(kind, args) \
  if (((kind *)args)->struct_size < sizeof(kind)) return failed("unexpected size of " #kind)

static void *error_destroy(ErrorDestroy *args) { free(args->error); return NULL; }
static void *error_message(ErrorMessage *args) {
  args->message = args->error->text;
  args->message_size = strlen(args->error->text);
  return NULL;
}
static void *initialize(Nothing *args) { CHECKED(Nothing, args); return NULL; }
static void *event_destroy(Event *args) { CHECKED(Event, args); alive--; free(args->event); return NULL; }
static void *event_await(Event *args) { CHECKED(Event, args); return NULL; }
static void *create(Create *args) {
  CHECKED(Create, args);
  const NamedValue *option = args->create_options;
  if (args->num_options != 1 || option->type != 4 || option->truth) return failed("odd options");
  printf("%.*s is off\n", (int)option->name_size, option->name);
  args->client = &client;
  return NULL;
}
static void *version(Version *args) {
  CHECKED(Version, args);
  args->platform_version = "cuda 13000, and more";
  args->platform_version_size = 10;
  return NULL;
}
static void *addressable(Devices *args) {
  CHECKED(Devices, args);
  args->devices = devices;
  args->num_devices = 1;
  return args->client == &client ? NULL : failed("another client");
}
static void *compile(Compile *args) {
  CHECKED(Compile, args);
  if (strncmp(args->program->format, "hlo", args->program->format_size)) return failed("odd format");
  if (args->program->code_size == 3) return failed("INTERNAL: it is no program");
  printf("compile %zu bytes, options %zu bytes\n", args->program->code_size, args->options_size);
  args->executable = malloc(1);
  alive++;
  return NULL;
}
static void *from_host(FromHost *args) {
  CHECKED(FromHost, args);
  if (args->device != &device || args->device_layout->type != 0) return failed("odd place");
  printf("buffer of type %d", args->type);
  for (size_t i = 0; i < args->num_dims; i++)
    printf(" [%ld every %ld, %ld]", (long)args->dims[i], (long)args->byte_strides[i],
           (long)args->device_layout->tiled.minor_to_major[i]);
  printf(" begins with %d\n", *(const unsigned char *)args->data);
  args->buffer = malloc(1);
  args->done_with_host_buffer = malloc(1);
  alive += 2;
  return NULL;
}
static void *buffer_destroy(Buffer *args) { CHECKED(Buffer, args); alive--; free(args->buffer); return NULL; }
static void *get_executable(Loaded *args) {
  CHECKED(Loaded, args);
  args->executable = malloc(1);
  alive++;
  return NULL;
}
static void *executable_destroy(Executable *args) {
  CHECKED(Executable, args);
  alive--;
  free(args->executable);
  return NULL;
}
static void *num_outputs(Outputs *args) { CHECKED(Outputs, args); args->num_outputs = 2; return NULL; }
static void *execute(Execute *args) {
  CHECKED(Execute, args);
  CHECKED(Options, args->options);
  if (args->num_devices != 1) return failed("odd inputs");
  printf("execute with %zu, kept", args->num_args);
  for (size_t i = 0; i < args->options->num_kept; i++) printf(" %ld", (long)args->options->kept[i]);
  printf("\n");
  for (size_t i = 0; i < args->num_args; i++)
    if (!args->argument_lists[0][i]) return failed("no input");
  for (int i = 0; i < 2; i++) args->output_lists[0][i] = malloc(1);
  args->events[0] = malloc(1);
  alive += 3;
  return NULL;
}

/* The table: its size, its extensions, its version (four words in all), and the functions by their place. */
static void *table[5 + 130];

int alive_objects(void) { return alive; }

void *GetPjrtApi(void) {
  setvbuf(stdout, NULL, _IONBF, 0);
  ((int *)&table[4])[0] = 0;
  ((int *)&table[4])[1] = 90;
  void **functions = table + 5;
  functions[0] = error_destroy;
  functions[1] = error_message;
  functions[3] = initialize;
  functions[5] = event_destroy;
  functions[8] = event_await;
  functions[10] = create;
  functions[14] = version;
  functions[16] = addressable;
  functions[20] = compile;
  functions[22] = from_host;
  functions[40] = executable_destroy;
  functions[44] = num_outputs;
  functions[50] = executable_destroy;
  functions[51] = get_executable;
  functions[55] = execute;
  functions[58] = buffer_destroy;
  return table;
}
