# The cffi extension: C emitted from cdef/*.h and the shim's header. The compiler checks it against upstream's headers.
file(GLOB _cdefs CONFIGURE_DEPENDS ${PYLLAMA_ROOT}/bindings/cdef/*.h ${PYLLAMA_SHIM_DIR}/pyllama_*.h)
set(_generated ${CMAKE_BINARY_DIR}/generated/_native.c)
add_custom_command(OUTPUT ${_generated}
    COMMAND ${Python_EXECUTABLE} ${PYLLAMA_ROOT}/bindings/build_ffi.py ${_generated}
    DEPENDS ${PYLLAMA_ROOT}/bindings/build_ffi.py ${_cdefs}
    COMMENT "Generating the cffi extension")

Python_add_library(_native MODULE USE_SABI 3.10 WITH_SOABI ${_generated})
target_include_directories(_native PRIVATE ${PYLLAMA_SHIM_DIR} ${PYLLAMA_LLAMA} ${PYLLAMA_TREE_patched}/include)
target_compile_definitions(_native PRIVATE LLAMA_SHARED GGML_SHARED GGML_BACKEND_SHARED)
target_link_libraries(_native PRIVATE shim-patched llama-patched ggml)
pyllama_sanitize_target(_native)
set_target_properties(_native PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
# There is no run-time path: native.py loads a variant first, and the loader finds the same SONAMEs in memory. If the
# extension is imported in another way, it fails, and does not guess. A wheel that travels has a path, for auditwheel.
set_target_properties(_native PROPERTIES INSTALL_RPATH "$<$<BOOL:${PYLLAMA_CPU_ALL}>:${PYLLAMA_ORIGIN}/lib/patched;${PYLLAMA_ORIGIN}/lib>")
target_link_options(_native PRIVATE $<$<PLATFORM_ID:Linux>:-Wl,--no-as-needed>)

# Debian's headers include a pyconfig.h for the kind of CPU, which is here for this machine's only; to the limited API they
# are the same.
if(CMAKE_CROSSCOMPILING)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_config_var('MULTIARCH'))"
        OUTPUT_VARIABLE _multiarch OUTPUT_STRIP_TRAILING_WHITESPACE)
    set(_pyconfig python${Python_VERSION_MAJOR}.${Python_VERSION_MINOR}/pyconfig.h)
    set(_here ${Python_INCLUDE_DIRS}/../${_multiarch}/${_pyconfig})
    set(_headers ${CMAKE_BINARY_DIR}/generated/headers)
    if(EXISTS "${_here}")
        file(CONFIGURE OUTPUT ${_headers}/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu/${_pyconfig} CONTENT "#include \"${_here}\"\n")
        target_include_directories(_native PRIVATE ${_headers})
    endif()
endif()
