// model: weights, metadata
struct llama_model;
enum llama_split_mode { LLAMA_SPLIT_MODE_NONE = ..., LLAMA_SPLIT_MODE_LAYER = ..., LLAMA_SPLIT_MODE_ROW = ..., ... };
enum llama_load_mode  {
    LLAMA_LOAD_MODE_AUTO = ..., LLAMA_LOAD_MODE_NONE = ..., LLAMA_LOAD_MODE_MMAP = ..., LLAMA_LOAD_MODE_MLOCK = ...,
    LLAMA_LOAD_MODE_MMAP_MLOCK = ..., ...
};
struct llama_model_tensor_buft_override { const char * pattern; ggml_backend_buffer_type_t buft; };
typedef bool (*llama_progress_callback)(float progress, void * user_data);

struct llama_model_params {
    ggml_backend_dev_t * devices;
    const struct llama_model_tensor_buft_override * tensor_buft_overrides;
    int32_t n_gpu_layers;
    enum llama_split_mode split_mode;
    enum llama_load_mode  load_mode;
    int32_t main_gpu;
    const float * tensor_split;
    llama_progress_callback progress_callback;
    void * progress_callback_user_data;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_alloc;
    bool load_mtp;
    ...;
};
struct llama_model_params llama_model_default_params(void);
void     llama_model_free(struct llama_model * model);
void     llama_backend_init(void);
int32_t  llama_model_n_ctx_train  (const struct llama_model * model);
int32_t  llama_model_n_embd_out   (const struct llama_model * model);
int32_t  llama_model_n_embd_inp   (const struct llama_model * model);
int32_t  llama_model_n_swa        (const struct llama_model * model);
int32_t  llama_model_n_layer      (const struct llama_model * model);
int32_t  llama_model_n_layer_nextn(const struct llama_model * model);
uint64_t llama_model_size         (const struct llama_model * model);
uint64_t llama_model_n_params     (const struct llama_model * model);
bool     llama_model_is_hybrid    (const struct llama_model * model);
bool     llama_model_is_recurrent (const struct llama_model * model);
int32_t  llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
const char * llama_model_chat_template(const struct llama_model * model, const char * name);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
// LoRA adapters; their model frees them
struct llama_adapter_lora;
enum llama_ftype { LLAMA_FTYPE_ALL_F32 = ..., LLAMA_FTYPE_MOSTLY_F16 = ..., ... };
struct llama_model_tensor_override { const char * pattern; enum ggml_type type; };
struct llama_model_quantize_params {
    int32_t nthread;
    enum llama_ftype ftype;
    bool allow_requantize;
    bool dry_run;
    const struct llama_model_tensor_override * tt_overrides;
    size_t max_buf_size;
    ...;
};
struct llama_model_quantize_params llama_model_quantize_default_params(void);
uint32_t llama_model_quantize(const char * fname_inp, const char * fname_out, const struct llama_model_quantize_params * params);
bool     llama_supports_gpu_offload(void);
size_t   llama_max_devices(void);
const char * llama_print_system_info(void);
