// An MTP block in a file of its own joins the model whose trunk is in another one.

#include "llama-mtp-file.h"

#include "llama-arch.h"
#include "llama-impl.h"
#include "llama-model-loader.h"
#include "llama-mtp.h"
#include "llama-mtp-guard.h"

#include "ggml-cpp.h"

#include <stdexcept>

namespace {

struct head_file {
    const char * path;
    uint32_t     n_layer_nextn;

    const llama_mtp_tensor * tensors;
    size_t                   n_tensors;
};

}

static thread_local const head_file * loaded_with = nullptr;

llama_model * llama_mtp_load_model(
        const char * path_model, const char * path_head, uint32_t n_layer_nextn,
        const llama_mtp_tensor * tensors, size_t n_tensors, llama_model_params params) {
    const head_file head = { path_head, n_layer_nextn, tensors, n_tensors };

    struct scope {
        explicit scope(const head_file * head) { loaded_with = head; }
        ~scope() { loaded_with = nullptr; }
    } during(&head);

    return llama_mtp_guard<llama_model *>(__func__, nullptr, [&] { return llama_model_load_from_file(path_model, params); });
}

void llama_mtp_add_head(llama_model_loader & ml) {
    const head_file * head = loaded_with;
    if (!head) {
        return;
    }

    ggml_context * metas = nullptr;
    gguf_context_ptr gguf { gguf_init_from_file(head->path, { /*.no_alloc =*/ true, /*.ctx =*/ &metas }) };
    ggml_context_ptr metas_ptr { metas };
    ggml_context_ptr named { ggml_init({ head->n_tensors*ggml_tensor_overhead(), nullptr, true }) };
    if (!gguf || !named) {
        throw std::runtime_error(format("failed to read an MTP head from %s", head->path));
    }

    const uint16_t idx = ml.files.size();
    ml.files.emplace_back(new llama_file(head->path, "rb", ml.use_direct_io));

    for (size_t i = 0; i < head->n_tensors; ++i) {
        const auto & wanted = head->tensors[i];
        if (!wanted.from) {
            const auto * gone = ml.require_tensor_meta(wanted.name);
            ml.n_elements -= ggml_nelements(gone);
            ml.n_bytes    -= ggml_nbytes(gone);
            ml.weights_map.erase(wanted.name);
            continue;
        }
        ggml_tensor * meta = ggml_get_tensor(metas, wanted.from);
        if (!meta) {
            throw std::runtime_error(format("no tensor '%s' in %s", wanted.from, head->path));
        }
        llama_model_loader::llama_tensor_weight weight(ml.files.back().get(), idx, gguf.get(), meta);
        weight.tensor = ggml_dup_tensor(named.get(), meta);
        ggml_set_name(weight.tensor, wanted.name);

        ml.n_elements += ggml_nelements(meta);
        ml.n_bytes    += ggml_nbytes(meta);

        if (!ml.weights_map.emplace(wanted.name, weight).second) {
            throw std::runtime_error(format("tensor '%s' is in the model and in %s", wanted.name, head->path));
        }
    }
    ml.contexts.push_back(std::move(named));

    uint32_t n_layer = 0;
    uint32_t n_nextn = 0;
    ml.get_key(LLM_KV_BLOCK_COUNT, n_layer);
    ml.get_key(LLM_KV_NEXTN_PREDICT_LAYERS, n_nextn, false);
    gguf_set_val_u32(ml.metadata, ml.llm_kv(LLM_KV_BLOCK_COUNT).c_str(), n_layer - n_nextn + head->n_layer_nextn);
    gguf_set_val_u32(ml.metadata, ml.llm_kv(LLM_KV_NEXTN_PREDICT_LAYERS).c_str(), head->n_layer_nextn);

    ml.n_tensors = ml.weights_map.size();
}
