// Preloaded before libggml-base: counts what goes to and from devices whose memory is not the host's.

#define _GNU_SOURCE
#include "ggml-backend.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>

struct traffic {
    long graphs;     // parts of graphs that were given to a device
    long uploads;    // host to device
    long downloads;  // device to host
    long waits;      // of the host for a device that was given something since the last one
    long cpu_graphs; // parts of graphs that the CPU computed; what it copies to a device itself is no upload
};

struct traffic traffic;
int failing;  // set by a test: waits for a device end as ggml's assertions do

#define NEXT(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

static bool on_device(ggml_backend_t backend) {
    return ggml_backend_dev_type(ggml_backend_get_device(backend)) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

// Devices' backends that were given something.
static ggml_backend_t busy[64];

static bool take(ggml_backend_t backend) {
    for (int i = 0; i < 64; ++i) {
        if (busy[i] == backend) {
            busy[i] = NULL;
            return true;
        }
    }
    return false;
}

static void give(ggml_backend_t backend) {
    take(backend);
    for (int i = 0; i < 64 && on_device(backend); ++i) {
        if (!busy[i]) {
            busy[i] = backend;
            return;
        }
    }
}

static bool in_device_memory(const struct ggml_tensor * tensor) {
    ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    return buffer && !ggml_backend_buffer_is_host(buffer);
}

// An asynchronous transfer that a backend lacks is made by the other function.
static __thread int inside;

#define TRANSFER(name, counter, first, parameters, arguments) \
    void name parameters {                                      \
        first;                                                  \
        traffic.counter += !inside && in_device_memory(tensor); \
        ++inside;                                               \
        NEXT(name) arguments;                                   \
        --inside;                                               \
    }

TRANSFER(ggml_backend_tensor_set, uploads, ,
        (struct ggml_tensor * tensor, const void * data, size_t offset, size_t size), (tensor, data, offset, size))
TRANSFER(ggml_backend_tensor_get, downloads, ,
        (const struct ggml_tensor * tensor, void * data, size_t offset, size_t size), (tensor, data, offset, size))
TRANSFER(ggml_backend_tensor_set_async, uploads, give(backend),
        (ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size),
        (backend, tensor, data, offset, size))
TRANSFER(ggml_backend_tensor_get_async, downloads, give(backend),
        (ggml_backend_t backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size),
        (backend, tensor, data, offset, size))

enum ggml_status ggml_backend_graph_compute_async(ggml_backend_t backend, struct ggml_cgraph * graph) {
    traffic.graphs += on_device(backend);
    traffic.cpu_graphs += !on_device(backend);
    give(backend);
    return NEXT(ggml_backend_graph_compute_async)(backend, graph);
}

void ggml_backend_synchronize(ggml_backend_t backend) {
    if (failing && on_device(backend)) {
        ggml_abort(__FILE__, __LINE__, "the device has failed");
    }
    traffic.waits += take(backend);
    NEXT(ggml_backend_synchronize)(backend);
}

void ggml_backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    give(backend);
    NEXT(ggml_backend_event_wait)(backend, event);
}

void ggml_backend_tensor_copy_async(
        ggml_backend_t from, ggml_backend_t to, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    give(to);
    NEXT(ggml_backend_tensor_copy_async)(from, to, src, dst);
}
