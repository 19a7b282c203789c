// A build leaves what is loaded later in files of its own.
export default { worker: { format: "es" } };
