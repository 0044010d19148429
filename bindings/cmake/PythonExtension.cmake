# The cffi extension: C emitted from cdef/*.h, checked by the compiler against upstream's headers.
file(GLOB _cdefs CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cdef/*.h)
set(_generated ${CMAKE_BINARY_DIR}/generated/_native.c)
add_custom_command(OUTPUT ${_generated}
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/build_ffi.py ${_generated}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/build_ffi.py ${_cdefs}
    COMMENT "Generating the cffi extension")

Python_add_library(_native MODULE USE_SABI 3.10 WITH_SOABI ${_generated})
target_include_directories(_native PRIVATE ${PYLLAMA_SHIM_DIR} ${PYLLAMA_TREE_patched}/include)
target_compile_definitions(_native PRIVATE LLAMA_SHARED GGML_SHARED GGML_BACKEND_SHARED)
target_link_libraries(_native PRIVATE shim-patched llama-patched ggml)
pyllama_sanitize_target(_native)
# No run-time path on purpose: native.py loads a variant first, and the loader then finds the same
# SONAMEs in memory. Imported any other way, the extension fails instead of guessing.
# A wheel that travels has one all the same, which the loader does not need: auditwheel follows it.
set_target_properties(_native PROPERTIES INSTALL_RPATH "$<$<BOOL:${PYLLAMA_CPU_ALL}>:$ORIGIN/lib/patched:$ORIGIN/lib>")
target_link_options(_native PRIVATE $<$<PLATFORM_ID:Linux>:-Wl,--no-as-needed>)
