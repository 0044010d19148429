# After ggml: our sources of the CPU backend, compiled into each of its targets with the options that ggml gives them.
# PYLLAMA_TREE_ggml says which tree ggml was made from; the upstream variant's has no calls of them.
set(PYLLAMA_GGML_CPU ${PYLLAMA_ROOT}/bindings/ggml-cpu)
if(PYLLAMA_TREE_ggml STREQUAL PYLLAMA_TREE_patched)
    file(GLOB _sources CONFIGURE_DEPENDS ${PYLLAMA_GGML_CPU}/*.cpp)
    foreach(_target ${GGML_AVAILABLE_BACKENDS})
        if(_target MATCHES "^ggml-cpu")
            target_sources(${_target} PRIVATE ${_sources})
            target_include_directories(${_target} PRIVATE ${PYLLAMA_GGML_CPU})
        endif()
    endforeach()
endif()
