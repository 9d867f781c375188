/* A stand-in nvidia-cuda-mps-control: keeps what it is told. Started with -d it creates the pipe folder's control file,
 * which is its daemon's life: `quit`, or whoever removes the file, ends it. Else it reads commands from its standard
 * input, and as long as the daemon lives appends each to $CUDA_MPS_LOG_DIRECTORY/control.log, and answers those that
 * have an answer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct place { char folder[2048], file[4096]; };

static struct place in(const char *variable, const char *fallback, const char *name)
{
    struct place place;
    const char *folder = getenv(variable);
    snprintf(place.folder, sizeof place.folder, "%s", folder && *folder ? folder : fallback);
    snprintf(place.file, sizeof place.file, "%s/%s", place.folder, name);
    return place;
}

static FILE *append_to(const struct place *place)
{
    mkdir(place->folder, 0755);
    FILE *file = fopen(place->file, "ae");
    if (!file)
        perror(place->file);
    return file;
}

int main(int argc, char **argv)
{
    char line[4096], share[64] = "100.0";
    if (argc > 1 && strcmp(argv[1], "-d") && strcmp(argv[1], "-f")) {
        fprintf(stderr, "usage: nvidia-cuda-mps-control [-d | -f]\n");
        return 1;
    }
    struct place life = in("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps", "control");
    struct place lines = in("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps", "control.log");
    int begin = argc > 1 && argv[1][1] == 'd', lives = !access(life.file, F_OK);
    if (begin == lives) {
        fprintf(stderr, begin ? "a control daemon is there already\n" : "there is no control daemon\n");
        return 1;
    }
    FILE *log = append_to(&lines);
    if (!log)
        return 1;
    if (begin) {
        FILE *control = append_to(&life);
        if (!control)
            return 1;
        fclose(control);
        fputs("start\n", log);
        return fclose(log) != 0;
    }
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        fprintf(log, "%s\n", line);
        fflush(log);
        if (!strncmp(line, "set_default_active_thread_percentage ", 37))
            snprintf(share, sizeof share, "%.60s", line + 37);
        if (!strcmp(line, "get_default_active_thread_percentage") || !strncmp(line, "set_default_active", 18))
            puts(share);
        else if (!strcmp(line, "quit")) {
            unlink(life.file);
            break;
        }
    }
    return fclose(log) != 0;
}
