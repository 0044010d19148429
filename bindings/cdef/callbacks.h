// Python functions that C calls; pyllama_mtp/llama/native.py says what they must do
extern "Python" void pyllama_on_log(enum ggml_log_level level, const char * text, void * user_data);
extern "Python" bool pyllama_on_load_progress(float progress, void * user_data);
extern "Python" int  pyllama_on_poll(void * data);
extern "Python" int  pyllama_on_wait(void * data);
void llama_log_set(void (*callback)(enum ggml_log_level level, const char * text, void * user_data), void * user_data);
