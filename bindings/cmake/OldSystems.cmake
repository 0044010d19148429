# A wheel for every CPU runs on old systems, too: libstdc++ is in each library, hidden, and so is what glibc 2.28 lacks.
# wheel.py does the rest.
if(PYLLAMA_CPU_ALL AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(_older ${PYLLAMA_SHIM_DIR}/older.cpp)
    set_source_files_properties(${_older} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    foreach(_target ggml ggml-base ${PYLLAMA_BACKENDS} llama-upstream llama-patched shim-upstream shim-patched
            dropin-upstream dropin-patched vision)
        target_sources(${_target} PRIVATE ${_older})
        target_link_options(${_target} PRIVATE -static-libstdc++ -Wl,--exclude-libs,libstdc++.a,--gc-sections)
    endforeach()
endif()
