# vendor/ holds the pristine tree. The patch queue makes a tree of it for each variant, in the build folder.
function(pyllama_run what)
    execute_process(COMMAND ${Python_EXECUTABLE} ${ARGN}
        RESULT_VARIABLE _rc OUTPUT_VARIABLE _out ERROR_VARIABLE _err OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT _rc EQUAL 0)
        message(FATAL_ERROR "pyllama-mtp: ${what} failed.\n${_out}\n${_err}")
    endif()
    set(PYLLAMA_RUN_OUTPUT "${_out}" PARENT_SCOPE)
endfunction()

set(PYLLAMA_PRISTINE ${PYLLAMA_ROOT}/vendor/llama.cpp)
set(_archive)
if(PYLLAMA_SDIST)
    set(_archive --archive ${PYLLAMA_SDIST})
endif()
pyllama_run("fetching the pinned upstream" ${PYLLAMA_ROOT}/vendor/fetch.py
    --dest ${PYLLAMA_PRISTINE} ${_archive})

# For maintainers: the repository that `patchqueue.py edit` made is built as it stands, before it is exported.
set(PYLLAMA_WORK "" CACHE PATH "build the patched variant from this work tree of the queue")

foreach(_variant upstream patched)
    set(PYLLAMA_TREE_${_variant} ${CMAKE_BINARY_DIR}/tree/${_variant})
    pyllama_run("applying the patch queue (${_variant})" ${PYLLAMA_ROOT}/patches/patchqueue.py
        apply --tree ${PYLLAMA_PRISTINE} --dest ${PYLLAMA_TREE_${_variant}} --variant ${_variant})
    pyllama_run("stamping" ${PYLLAMA_ROOT}/patches/patchqueue.py stamp --variant ${_variant})
    set(PYLLAMA_SERIES_${_variant} ${PYLLAMA_RUN_OUTPUT})
    message(STATUS "pyllama-mtp: ${_variant} tree, patch series ${PYLLAMA_SERIES_${_variant}}")
endforeach()

if(PYLLAMA_WORK)
    set(PYLLAMA_TREE_patched ${PYLLAMA_WORK})
    message(STATUS "pyllama-mtp: the patched variant is built from ${PYLLAMA_WORK}")
endif()

# Reconfigure when the pin or a patch changes.
file(GLOB _inputs CONFIGURE_DEPENDS ${PYLLAMA_ROOT}/patches/*.patch ${PYLLAMA_ROOT}/patches/series
    ${PYLLAMA_ROOT}/vendor/*.pin)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_inputs})

file(READ ${PYLLAMA_PRISTINE}/.pyllama-mtp-tree.json _pin)
string(JSON PYLLAMA_UPSTREAM_COMMIT GET "${_pin}" commit)
set(PYLLAMA_UPSTREAM_BUILD 0)  # the number of "b11549"; of a commit it is not known
if(PYLLAMA_UPSTREAM_COMMIT MATCHES "^b([0-9]+)$")
    set(PYLLAMA_UPSTREAM_BUILD ${CMAKE_MATCH_1})
endif()
