# After ggml: our sources of its backends, bindings/ggml-cpu and bindings/ggml-cuda, compiled into each of their targets with
# the options that ggml gives them. PYLLAMA_TREE_ggml says which tree ggml was made from; the upstream variant's does not
# call them. In the patched tree a new file is found without being named here.
function(pyllama_add_our_sources backend pattern)
    set(_folder ${PYLLAMA_ROOT}/bindings/${backend})
    file(GLOB _sources CONFIGURE_DEPENDS ${_folder}/${pattern})
    foreach(_target ${GGML_AVAILABLE_BACKENDS})
        if(_sources AND _target MATCHES "^${backend}(-|$)")
            target_sources(${_target} PRIVATE ${_sources})
            target_include_directories(${_target} PRIVATE ${_folder} ${PYLLAMA_TREE_ggml}/ggml/src/${backend})
        endif()
    endforeach()
endfunction()

if(PYLLAMA_TREE_ggml STREQUAL PYLLAMA_TREE_patched)
    pyllama_add_our_sources(ggml-cpu *.cpp)
    pyllama_add_our_sources(ggml-cuda *.cu)
endif()
