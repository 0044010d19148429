# A libllama for each variant. Sources that no patch changes, themselves or through a header, are compiled once.
set(PYLLAMA_SHIM_DIR ${PYLLAMA_ROOT}/bindings/shim)
set(PYLLAMA_LLAMA ${PYLLAMA_ROOT}/bindings/llama)

# The version numbers live in upstream's top-level CMakeLists.txt, which we do not run.
file(STRINGS ${PYLLAMA_TREE_upstream}/CMakeLists.txt _lines REGEX "^set\\(LLAMA_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+\\)")
foreach(_line ${_lines})
    string(REGEX MATCH "(LLAMA_VERSION_[A-Z]+) +([0-9]+)" _ ${_line})
    set(${CMAKE_MATCH_1} ${CMAKE_MATCH_2})
endforeach()
set(LLAMA_VERSION "${LLAMA_VERSION_MAJOR}.${LLAMA_VERSION_MINOR}.${LLAMA_VERSION_PATCH}")
set(LLAMA_BUILD_COMMIT ${PYLLAMA_UPSTREAM_COMMIT})
configure_file(${PYLLAMA_TREE_upstream}/src/llama-version.h.in ${CMAKE_BINARY_DIR}/generated/llama-version.h @ONLY)

pyllama_run("comparing the variants" ${PYLLAMA_ROOT}/bindings/shared_sources.py
    ${PYLLAMA_TREE_upstream} ${PYLLAMA_TREE_patched})
set(PYLLAMA_SHARED_SOURCES ${PYLLAMA_RUN_OUTPUT})

function(llama_target_options target tree)
    target_include_directories(${target} PRIVATE ${tree}/src ${tree}/include ${PYLLAMA_LLAMA} ${CMAKE_BINARY_DIR}/generated)
    target_compile_features(${target} PRIVATE cxx_std_17)
    target_compile_definitions(${target} PRIVATE LLAMA_BUILD LLAMA_SHARED)
    target_link_libraries(${target} PRIVATE ggml Threads::Threads)
endfunction()

# models/*.cpp are compiled in bundles, as upstream does (UNITY_BUILD): half the build time.
function(llama_unity target)
    get_target_property(_sources ${target} SOURCES)
    foreach(_source ${_sources})
        if(NOT _source MATCHES "/src/models/")
            set_source_files_properties(${_source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
        endif()
    endforeach()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16
        UNITY_BUILD_RELOCATABLE ON)  # relative includes: ccache then hits from any build folder
endfunction()

# The stamp is a file, not definitions of the target: any change of ours changes it, and must not compile all of libllama.
function(llama_stamp variant)
    set(PYLLAMA_SERIES ${PYLLAMA_SERIES_${variant}})
    set(PYLLAMA_CUDA_STAMP false)
    if(GGML_CUDA)
        set(PYLLAMA_CUDA_STAMP "\\\"${PYLLAMA_CUDA}\\\"")
    endif()
    set(_stamp ${CMAKE_BINARY_DIR}/generated/stamp-${variant}.c)
    configure_file(${PYLLAMA_SHIM_DIR}/stamp.c.in ${_stamp} @ONLY)
    target_sources(llama-${variant} PRIVATE ${_stamp})
    set_source_files_properties(${_stamp} PROPERTIES INCLUDE_DIRECTORIES ${PYLLAMA_SHIM_DIR})
endfunction()

function(llama_shared_objects)
    find_package(Threads REQUIRED)
    list(TRANSFORM PYLLAMA_SHARED_SOURCES PREPEND ${PYLLAMA_TREE_upstream}/ OUTPUT_VARIABLE _sources)
    add_library(llama-shared OBJECT ${_sources})
    llama_target_options(llama-shared ${PYLLAMA_TREE_upstream})
    pyllama_sanitize_all_of(llama-shared)
    llama_unity(llama-shared)
    list(LENGTH PYLLAMA_SHARED_SOURCES _n)
    message(STATUS "pyllama-mtp: ${_n} sources of libllama are compiled once for both variants")
endfunction()

function(llama_variant variant)
    set(_tree ${PYLLAMA_TREE_${variant}})
    file(GLOB _all RELATIVE ${_tree} ${_tree}/src/*.cpp ${_tree}/src/models/*.cpp)
    list(REMOVE_ITEM _all ${PYLLAMA_SHARED_SOURCES})
    list(TRANSFORM _all PREPEND ${_tree}/ OUTPUT_VARIABLE _own)

    if(variant STREQUAL "patched")
        file(GLOB _ours CONFIGURE_DEPENDS ${PYLLAMA_LLAMA}/*.cpp)
        list(APPEND _own ${_ours})
        pyllama_sanitize_sources(_own ${_tree})
    endif()
    set(_llama llama-${variant})
    add_library(${_llama} SHARED ${_own} $<TARGET_OBJECTS:llama-shared>)
    llama_stamp(${variant})
    llama_target_options(${_llama} ${_tree})
    llama_unity(${_llama})
    set_target_properties(${_llama} PROPERTIES OUTPUT_NAME llama SOVERSION ${LLAMA_VERSION_MAJOR}
        LINKER_LANGUAGE CXX LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/${variant})

    # The shim. Upstream's libllama has nothing of llama-mtp.h, so its shim adds what it can: the file of the C API, and
    # functions that say that the rest is absent.
    set(_shim shim-${variant})
    add_library(${_shim} SHARED ${PYLLAMA_SHIM_DIR}/shim.cpp)
    if(variant STREQUAL "upstream")
        target_sources(${_shim} PRIVATE ${PYLLAMA_LLAMA}/llama-mtp.cpp ${PYLLAMA_SHIM_DIR}/mtp_absent.cpp)
    endif()
    target_include_directories(${_shim} PRIVATE ${PYLLAMA_SHIM_DIR}
        ${_tree}/include ${_tree}/src ${PYLLAMA_LLAMA})
    target_compile_definitions(${_shim} PRIVATE LLAMA_BUILD LLAMA_SHARED)
    target_link_libraries(${_shim} PRIVATE ${_llama} ggml Threads::Threads)
    if(GGML_OPENMP_ENABLED)  # the shim makes ggml's threads
        find_package(OpenMP REQUIRED COMPONENTS CXX)
        target_link_libraries(${_shim} PRIVATE OpenMP::OpenMP_CXX)
    endif()
    set_target_properties(${_shim} PROPERTIES OUTPUT_NAME pyllama-mtp
        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/${variant})
    if(variant STREQUAL "patched")
        pyllama_sanitize_all_of(${_llama})
        pyllama_sanitize_target(${_shim})
    endif()

    # libllama.so for other programs. They search it for functions of all these libraries, so it needs all of them.
    set(_dropin dropin-${variant})
    add_library(${_dropin} SHARED ${PYLLAMA_SHIM_DIR}/dropin.cpp)
    target_compile_features(${_dropin} PRIVATE cxx_std_17)
    target_include_directories(${_dropin} PRIVATE ${PYLLAMA_SHIM_DIR} ${_tree}/include)
    target_compile_definitions(${_dropin} PRIVATE LLAMA_SHARED
        PYLLAMA_LIBLLAMA="$<$<PLATFORM_ID:Darwin>:@rpath/>$<TARGET_SONAME_FILE_NAME:${_llama}>"
        PYLLAMA_HAS_PATCHES=$<IF:$<STREQUAL:${variant},patched>,true,false>)
    target_link_libraries(${_dropin} PRIVATE ${_llama} ggml ${CMAKE_DL_LIBS})
    target_link_options(${_dropin} PRIVATE $<$<PLATFORM_ID:Linux>:-Wl,--no-as-needed>)
    # In a folder of its own: in the build folder, the linker's name for libllama is libllama.so, too.
    set_target_properties(${_dropin} PROPERTIES OUTPUT_NAME llama
        LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/${variant}/dropin)
endfunction()
