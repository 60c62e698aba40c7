# cmake --install and find_package(Mixtape CONFIG).
#
# Headers keep their folders below include/mixtape, which is the include path a consumer gets: both
# <mixtape.h> and the "engine/x.h" forms inside it resolve there.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Mixtape")

install(TARGETS mixtape EXPORT MixtapeTargets)
install(EXPORT MixtapeTargets NAMESPACE mixtape:: DESTINATION "${config_dir}")
install(FILES engine/public/mixtape.h DESTINATION include/mixtape)
install(DIRECTORY engine kernels ops nn optim io distributed DESTINATION include/mixtape
        FILES_MATCHING PATTERN "*.h" PATTERN "*.def"
        PATTERN engine/public EXCLUDE PATTERN kernels/cpu EXCLUDE PATTERN kernels/cuda EXCLUDE
        PATTERN io/json.h EXCLUDE)

configure_package_config_file(tools/cmake/MixtapeConfig.cmake.in MixtapeConfig.cmake
                              INSTALL_DESTINATION "${config_dir}")
write_basic_package_version_file(MixtapeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/MixtapeConfig.cmake"
              "${PROJECT_BINARY_DIR}/MixtapeConfigVersion.cmake"
              tools/cmake/FindCUDNN.cmake tools/cmake/FindNCCL.cmake tools/cmake/FindOneDNN.cmake
              tools/cmake/FindPCRE2.cmake
        DESTINATION "${config_dir}")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
