# The wheel holds the extension, the libraries under the names that their users ask for, and two licences.
set(_package pyllama_mtp)
install(TARGETS _native LIBRARY DESTINATION ${_package})
install(TARGETS ggml ggml-base LIBRARY DESTINATION ${_package}/lib NAMELINK_SKIP)
install(TARGETS vision LIBRARY DESTINATION ${_package}/lib)
foreach(_variant upstream patched)
    install(TARGETS llama-${_variant} shim-${_variant} dropin-${_variant}
        LIBRARY DESTINATION ${_package}/lib/${_variant} NAMELINK_SKIP)
endforeach()
install(FILES ${PYLLAMA_PRISTINE}/LICENSE DESTINATION ${_package}/licenses RENAME LICENSE-llama.cpp)
install(FILES ${PYLLAMA_PRISTINE}/licenses/LICENSE-jsonhpp DESTINATION ${_package}/licenses)

# What the bindings expect of a library; see pyllama_mtp/llama/native.py.
file(WRITE ${CMAKE_BINARY_DIR}/generated/build_info.json
"{\n \"upstream_commit\": \"${PYLLAMA_UPSTREAM_COMMIT}\",\n \"series\": {\"upstream\": \"${PYLLAMA_SERIES_upstream}\", \"patched\": \"${PYLLAMA_SERIES_patched}\"}\n}\n")
install(FILES ${CMAKE_BINARY_DIR}/generated/build_info.json DESTINATION ${_package})

# Backends; wheel.py takes one alone, with what that was built from.
foreach(_backend ${PYLLAMA_BACKENDS})
    install(TARGETS ${_backend} LIBRARY DESTINATION ${_package}/lib COMPONENT ${_backend})
    install(FILES ${CMAKE_BINARY_DIR}/generated/build_info.json DESTINATION ${_package}/lib RENAME lib${_backend}.json
        COMPONENT ${_backend} EXCLUDE_FROM_ALL)
endforeach()
