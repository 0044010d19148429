// ggml
enum ggml_type {
    GGML_TYPE_F32 = ..., GGML_TYPE_F16 = ..., GGML_TYPE_BF16 = ...,
    GGML_TYPE_Q4_0 = ..., GGML_TYPE_Q8_0 = ..., GGML_TYPE_IQ4_NL = ..., ...
};
enum ggml_log_level {
    GGML_LOG_LEVEL_NONE = ..., GGML_LOG_LEVEL_DEBUG = ..., GGML_LOG_LEVEL_INFO = ...,
    GGML_LOG_LEVEL_WARN = ..., GGML_LOG_LEVEL_ERROR = ..., GGML_LOG_LEVEL_CONT = ..., ...
};
enum ggml_backend_dev_type {
    GGML_BACKEND_DEVICE_TYPE_CPU = ..., GGML_BACKEND_DEVICE_TYPE_GPU = ...,
    GGML_BACKEND_DEVICE_TYPE_IGPU = ..., GGML_BACKEND_DEVICE_TYPE_ACCEL = ..., ...
};
typedef struct ggml_backend_device * ggml_backend_dev_t;
typedef struct ggml_backend_reg    * ggml_backend_reg_t;

void   ggml_backend_load_all_from_path(const char * dir_path);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t         ggml_backend_dev_get(size_t index);
const char *               ggml_backend_dev_name(ggml_backend_dev_t device);
const char *               ggml_backend_dev_description(ggml_backend_dev_t device);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);

typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
const char *               ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
typedef struct ggml_backend_buffer * ggml_backend_buffer_t;
void * ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer);
void   ggml_backend_buffer_free    (ggml_backend_buffer_t buffer);

// A backend's functions, by name. RPC's are in a library of their own, which some builds lack.
ggml_backend_reg_t ggml_backend_reg_by_name(const char * name);
size_t             ggml_backend_reg_dev_count(ggml_backend_reg_t reg);
ggml_backend_dev_t ggml_backend_reg_dev_get  (ggml_backend_reg_t reg, size_t index);
void *             ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);

// Converting rows of matrices: to F32, and from F32 to another type.
struct ggml_type_traits { void (*to_float)(const void * x, float * y, int64_t k); ...; };
const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type);
bool   ggml_quantize_requires_imatrix(enum ggml_type type);
size_t ggml_quantize_chunk(enum ggml_type type, const float * src, void * dst, int64_t start, int64_t nrows, int64_t n_per_row, const float * imatrix);
