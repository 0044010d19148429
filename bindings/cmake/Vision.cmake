# libpyllama-vision: upstream's tools/mtmd, from the pristine tree, and our calls of it. One for both variants: it asks for
# the SONAMEs of libllama and of the shim, and the process has loaded one of each.
set(_mtmd ${PYLLAMA_TREE_upstream}/tools/mtmd)
file(GLOB _sources ${_mtmd}/clip.cpp ${_mtmd}/mtmd.cpp ${_mtmd}/mtmd-audio.cpp ${_mtmd}/mtmd-image.cpp ${_mtmd}/models/*.cpp)
add_library(vision SHARED ${_sources} ${PYLLAMA_SHIM_DIR}/vision.cpp)
target_include_directories(vision PRIVATE ${PYLLAMA_SHIM_DIR} ${_mtmd} ${PYLLAMA_TREE_upstream}/include)
target_compile_definitions(vision PRIVATE LLAMA_SHARED)
target_link_libraries(vision PRIVATE shim-patched llama-patched ggml Threads::Threads)
foreach(_source ${_sources} ${PYLLAMA_SHIM_DIR}/vision.cpp)
    if(NOT _source MATCHES "/models/")
        set_source_files_properties(${_source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
endforeach()
set_target_properties(vision PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 32 UNITY_BUILD_RELOCATABLE ON
    OUTPUT_NAME pyllama-vision CXX_VISIBILITY_PRESET hidden
    INSTALL_RPATH "${PYLLAMA_ORIGIN};$<$<BOOL:${PYLLAMA_CPU_ALL}>:${PYLLAMA_ORIGIN}/patched>"  # as of _native
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
