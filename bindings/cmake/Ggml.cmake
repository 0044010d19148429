# ggml once, from PYLLAMA_TREE_ggml. The variants share it: what the patches change in it lies in the CPU
# backend, behind switches that the upstream variant turns off when it is loaded (pyllama_set_cpu_changes),
# and in the RPC backend, where it matters to lost workers and to several clients of one; or where an allocation has
# failed, which is all that they may change in the files of _on_failure; or it lets the Vulkan backend compile.
set(_on_failure ggml/src/ggml-alloc.c ggml/src/ggml-backend.cpp)
set(GGML_BACKEND_DL ON CACHE BOOL "" FORCE)
set(GGML_BUILD_TESTS OFF CACHE BOOL "" FORCE)
set(GGML_BUILD_EXAMPLES OFF CACHE BOOL "" FORCE)
# What upstream's own top-level CMakeLists.txt, which we do not run, turns on in ggml.
set(GGML_LLAMAFILE_DEFAULT ON)
set(GGML_CUDA_GRAPHS_DEFAULT ON)
# Devices of other processes and machines. Without RDMA, whose library would be needed wherever a wheel is used.
set(GGML_RPC ON CACHE BOOL "the RPC backend: workers (pyllama-mtp rpc-worker)")
set(GGML_RPC_RDMA OFF CACHE BOOL "RDMA transport of the RPC backend")

file(GLOB_RECURSE _theirs RELATIVE ${PYLLAMA_TREE_upstream} ${PYLLAMA_TREE_upstream}/ggml/*)
foreach(_file ${_theirs})
    execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files
        ${PYLLAMA_TREE_upstream}/${_file} ${PYLLAMA_TREE_patched}/${_file} RESULT_VARIABLE _differs)
    if(_differs AND NOT _file MATCHES "^ggml/(src/ggml-(cpu|rpc|vulkan)/|include/ggml-rpc)" AND NOT _file IN_LIST _on_failure)
        message(FATAL_ERROR "pyllama-mtp: ${_file} differs between the variants, but they share ggml: only its "
            "CPU backend may differ, behind a switch, its RPC and Vulkan backends, and what follows a failed allocation. "
            "Mark the patch `both` in patches/series.")
    endif()
endforeach()

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/backends)
# ggml asks git for its commit; the answer would be ours, and change with every commit of ours.
set(ENV{GIT_CEILING_DIRECTORIES} ${CMAKE_BINARY_DIR})
# An assertion that fails becomes a C++ exception where the shim waits for one; it passes through C.
add_compile_options($<$<COMPILE_LANGUAGE:C>:-fexceptions>)
# The Vulkan backend has a project inside whose cache names the ninja of the pip that built it first, which is gone.
file(REMOVE ${CMAKE_BINARY_DIR}/ggml/src/ggml-vulkan/vulkan-shaders-gen-prefix/src/vulkan-shaders-gen-build/CMakeCache.txt)
add_subdirectory(${PYLLAMA_TREE_ggml}/ggml ${CMAKE_BINARY_DIR}/ggml EXCLUDE_FROM_ALL)

# Backends are loaded by file name, so they carry no version; ggml and ggml-base are installed under
# the name that other libraries ask for (their SONAME), because a wheel cannot hold links.
set(PYLLAMA_BACKENDS ${GGML_AVAILABLE_BACKENDS})
foreach(_target ggml ggml-base)
    set_property(TARGET ${_target} PROPERTY VERSION)
    set_property(TARGET ${_target} PROPERTY PUBLIC_HEADER)
endforeach()
foreach(_target ${PYLLAMA_BACKENDS})
    set_property(TARGET ${_target} PROPERTY VERSION)
    set_property(TARGET ${_target} PROPERTY SOVERSION)
endforeach()
